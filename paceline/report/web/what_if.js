"use strict";
// What if: sliders choose a program and a bandwidth; the step is simulated and drawn under the one as run.
const whatIf = (() => {
  const source = document.getElementById("what-if-data");
  if (!source) return null;
  const data = JSON.parse(source.textContent);
  const canvas = document.getElementById("what-if-lanes");
  const told = document.getElementById("what-if-told");
  const context = canvas.getContext("2d");
  const LANE = 20, HEAD = 20, DECADE = 20;
  const sliders = Object.fromEntries(["stage", "devices", "bucket", "bandwidth"].map((name) => [name, document.getElementById(`what-if-${name}`)]));
  const own = { stage: data.own[0], devices: data.own[1], bucket: data.own[2], bandwidth: 2 * DECADE };
  const state = { ...own };
  let shown = null, asRun = null, width = 0;

  // ---- what is predicted

  const setting = (at) => `${data.stages[at.stage]} ${data.devices[at.devices]} ${text(data.buckets[at.bucket])}`;
  // As Python writes a number of MiB, which names a setting.
  const text = (value) => data.bucketNames[data.buckets.indexOf(value)];
  const hasLimit = data.bandwidth !== null;
  const bandwidth = (at) => (hasLimit ? data.bandwidth : Infinity) * 10 ** ((at.bandwidth - 2 * DECADE) / DECADE);

  // The step with a setting; a sentence where there is none.
  function predict(at, speed = bandwidth(at)) {
    const found = data.settings[setting(at)];
    if (typeof found === "string") return { refused: found };
    const [shape, fixed, carried, sent] = found, program = data.shapes[shape], costs = program.fixed.slice();
    program.changing.forEach((op, i) => { costs[op] = fixed[i] + carried[i] / speed * 1e6; });
    return { program, sent, ...simulation.predict(program, costs, data.steps) };
  }

  // ---- in words

  function words(at) {
    const times = 10 ** ((at.bandwidth - 2 * DECADE) / DECADE);
    const asRunOr = (name, said) => (at[name] === own[name] ? `${said} (as run)` : said);
    return {
      stage: asRunOr("stage", `zero ${data.stages[at.stage]}`),
      devices: asRunOr("devices", `${data.devices[at.devices]}`),
      bucket: data.usesBuckets[data.stages[at.stage]] ? asRunOr("bucket", `${drawing.digits(data.buckets[at.bucket])} MiB`) : "of whole units: no choice here",
      bandwidth: !hasLimit ? "more than this run tells: no choice here" : asRunOr("bandwidth", `${drawing.rate(bandwidth(at))}`) + (times === 1 ? "" : `, ${drawing.digits(times)} times as run`),
    };
  }

  function describe() {
    if (shown.refused) return `These settings do not go together: ${shown.refused}`;
    const change = shown.seconds / asRun.seconds - 1, share = `${(100 * Math.abs(change)).toFixed(1)} %`;
    const isOwn = Object.keys(own).every((name) => state[name] === own[name]);
    const against = isOwn ? "as run" : Math.abs(change) < 0.0005 ? "as long as as run" : `${share} ${change < 0 ? "less" : "more"} than as run`;
    const devices = data.devices[state.devices], scale = devices / data.devices[own.devices] * asRun.seconds / shown.seconds;
    return `A step takes ${drawing.microseconds(shown.seconds)}, ${against}: ${drawing.microseconds(shown.span)} from its first op to its last, `
      + `${drawing.microseconds(shown.exposed)} in which nothing computes. A rank sends ${drawing.bytes(shown.sent)}. `
      + `${devices} ${devices === 1 ? "device does" : "devices do"} ${drawing.digits(scale)} times the run's work in a second.`;
  }

  // ---- drawing

  function lanesOf(step) {
    return data.streams.map((_, stream) => stream).filter((stream) => step.program.stream.includes(stream));
  }

  function draw() {
    const steps = [["As run", asRun], ["With these settings", shown]].filter(([, step]) => !step.refused);
    const rows = steps.reduce((sum, [, step]) => sum + lanesOf(step).length, 0);
    const height = steps.length * HEAD + rows * LANE + 6, ratio = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = drawing.colour("page");
    context.fillRect(0, 0, width, height);
    context.textBaseline = "middle";
    const gutter = width < 600 ? 70 : 110, longest = Math.max(...steps.map(([, step]) => step.seconds));
    const pens = { stripes: drawing.stripes(context), scale: (width - gutter - 4) / longest, gutter };
    for (const name of ["forward", "backward", "update", "other", "hidden", "page", "text", "soft", "line", "on-light", "on-dark"]) pens[name] = drawing.colour(name);
    let y = 2;
    for (const [title, step] of steps) y = drawStep(title, step, y, pens);
  }

  function drawStep(title, step, y, pens) {
    const end = pens.gutter + step.seconds * pens.scale, lanes = lanesOf(step);
    context.font = "600 12px system-ui, sans-serif";
    context.fillStyle = pens.text;
    context.fillText(`${title}: ${drawing.microseconds(step.seconds)}`, 2, y + HEAD / 2);
    lanes.forEach((stream, row) => {
      const top = y + HEAD + row * LANE;
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = pens.soft;
      context.fillText(data.streams[stream], 2, top + LANE / 2);
      context.fillStyle = pens.line;
      context.fillRect(pens.gutter, top + LANE - 1, end - pens.gutter, 1);
      for (const times of [step.last.before, step.last]) if (times) drawOps(step, times, stream, top, pens);
    });
    // Where the step ends.
    context.fillStyle = pens.text;
    context.fillRect(end, y + HEAD, 1.5, lanes.length * LANE);
    return y + HEAD + lanes.length * LANE;
  }

  function drawOps(step, times, stream, top, pens) {
    const { program, last, seconds } = step, place = (time) => pens.gutter + Math.min(seconds, Math.max(0, time - last.began)) * pens.scale;
    for (let i = 0; i < program.stream.length; i++) {
      if (program.stream[i] !== stream || times.end[i] <= last.began || times.start[i] >= last.began + seconds) continue;
      const left = place(times.start[i]), right = place(times.end[i]), wide = Math.max(0.6, right - left);
      const kind = drawing.kind(data.kinds[program.kind[i]], program.computes[i]);
      context.fillStyle = pens[kind];
      context.fillRect(left, top + 2, wide, LANE - 4);
      const stood = place(times.end[i]) - place(times.end[i] - times.exposed[i]);
      if (stood > 0) { context.fillStyle = pens.stripes; context.fillRect(right - stood, top + 2, stood, LANE - 4); }
      if (wide > 3) { context.strokeStyle = pens.page; context.lineWidth = 1; context.strokeRect(left, top + 2, wide, LANE - 4); }
      if (wide > 16) name(program, i, left, wide, top, kind, stood > 0, pens);
    }
  }

  function name(program, i, left, wide, top, kind, plate, pens) {
    const short = { forward: "F ", backward: "B " }[kind] || "";
    let label = short + data.names[program.name[i]].replace(/^bucket /, "");
    const long = context.measureText(label).width;
    if (long > wide - 6) {
      label = label.slice(0, Math.floor(label.length * (wide - 6) / long) - 2) + "…";
      if (label.length < 3) return;
    }
    // Stripes that a name would hide say more than the name.
    if (plate && context.measureText(label).width + 4 > 0.5 * wide) return;
    if (plate) { context.fillStyle = pens.page; context.fillRect(left + 2, top + 4, context.measureText(label).width + 4, LANE - 8); }
    context.fillStyle = plate ? pens.text : kind === "backward" ? pens["on-dark"] : pens["on-light"];
    context.fillText(label, left + 4, top + LANE / 2 + 0.5);
  }

  // ---- the hand and the keyboard

  function show() {
    shown = predict(state);
    const said = words(state);
    for (const [name, slider] of Object.entries(sliders)) {
      slider.value = state[name];
      slider.setAttribute("aria-valuetext", said[name]);
      document.getElementById(`what-if-${name}-told`).textContent = said[name];
    }
    sliders.bandwidth.disabled = !hasLimit;
    sliders.bucket.disabled = !data.usesBuckets[data.stages[state.stage]];
    told.textContent = describe();
    canvas.setAttribute("aria-label", `The step as run and with these settings. ${told.textContent}`);
    draw();
  }

  for (const [name, slider] of Object.entries(sliders)) {
    slider.addEventListener("input", () => { state[name] = Number(slider.value); show(); });
  }
  document.getElementById("what-if-own").addEventListener("click", () => { Object.assign(state, own); show(); });
  asRun = predict(own);
  show();
  new ResizeObserver(() => { if (canvas.clientWidth !== width) draw(); }).observe(canvas.parentElement);
  drawing.onChange(draw);
  return { data, state, predict, show, shown: () => shown };
})();
