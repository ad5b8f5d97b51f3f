"use strict";
// The timeline: one lane per rank and stream on a canvas. Only what is in view is drawn, and of ops narrower than a
// pixel one, so that a step of 100,000 ops moves smoothly.
const timeline = (() => {
  const source = document.getElementById("timeline-data");
  if (!source) return null;
  const data = JSON.parse(source.textContent);
  const canvas = document.getElementById("lanes");
  const details = document.getElementById("details");
  const picker = document.getElementById("step");
  const context = canvas.getContext("2d");
  const LANE = 22, AXIS = 24, HINT = details.textContent;
  const COMPUTE = new Set(["forward", "backward", "update", "unshard", "reshard", "copy_in", "statistics", "publish", "cast"]);

  const state = {
    step: null, index: -1, from: 0, to: 1, length: 1, selected: -1, hovered: -1, critical: false,
    predictions: Boolean(data.predicted), lanes: [], order: [], row: [], drawn: 0,
    frameMs: 0,
  };
  let colours = {}, hatch = null, pending = false, width = 0, gutter = 0;

  // ---- steps

  function show(index) {
    const { isPredicted: canPredict } = data.steps[index];
    const step = state.predictions && canPredict ? withPrediction(data.steps[index]) : data.steps[index];
    document.getElementById("predicted").disabled = !canPredict;
    state.step = step;
    state.index = index;
    state.length = Math.max(1, ...step.start.map((start, i) => start + step.took[i]));
    state.selected = state.hovered = -1;
    state.lanes = step.lanes.map(() => [0, 0]);
    for (let i = 0; i < step.lane.length; i++) {
      const lane = state.lanes[step.lane[i]];
      if (lane[1] === 0) lane[0] = i;
      lane[1] = i + 1;
    }
    const byPlace = (a, b) => step.lanes[a][0] - step.lanes[b][0] || isPredicted(a) - isPredicted(b) || a - b;
    state.order = step.lanes.map((_, lane) => lane).sort(byPlace);
    state.row = [];
    state.order.forEach((lane, row) => { state.row[lane] = row; });
    resize();
    whole();
    tell();
  }

  // The same ops by the schedule's own times, as more lanes behind the measured ones.
  function withPrediction(step) {
    const more = data.predicted, joined = { ...step };
    for (const name of ["kind", "name", "start", "took", "exposed", "bytes", "sent", "microBatch"]) {
      joined[name] = step[name].concat(more[name]);
    }
    joined.lanes = step.lanes.concat(more.lanes.map(([rank, stream]) => [rank, stream, 1]));
    joined.lane = step.lane.concat(more.lane.map((lane) => lane + step.lanes.length));
    joined.meeting = step.meeting.concat(more.lane.map(() => -1));
    return joined;
  }

  const isPredicted = (lane) => state.step.lanes[lane].length > 2;

  function whole() {
    look(-0.005 * state.length, 1.005 * state.length);
  }

  function look(from, to) {
    const least = state.length / 1e6, most = 1.01 * state.length;
    const span = Math.min(Math.max(to - from, least), most);
    const middle = (from + to) / 2;
    const margin = 0.005 * state.length;
    state.from = Math.min(Math.max(middle - span / 2, -margin), state.length + margin - span);
    state.to = state.from + span;
    ask();
  }

  function zoom(factor, at = (state.from + state.to) / 2) {
    look(at - (at - state.from) * factor, at + (state.to - at) * factor);
  }

  function pan(share) {
    const by = share * (state.to - state.from);
    look(state.from + by, state.to + by);
  }

  // ---- places

  const x = (time) => gutter + (width - gutter) * (time - state.from) / (state.to - state.from);
  const time = (at) => state.from + (at - gutter) / (width - gutter) * (state.to - state.from);
  const top = (lane) => AXIS + state.row[lane] * LANE;

  // The first op of a lane that ends after a time.
  function firstAfter(lane, at) {
    let [low, high] = state.lanes[lane];
    const { start, took } = state.step;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] + took[middle] <= at) low = middle + 1; else high = middle;
    }
    return low;
  }

  function opAt(px, py) {
    const lane = state.order[Math.floor((py - AXIS) / LANE)];
    if (lane === undefined || px < gutter) return -1;
    const slack = 2 * (state.to - state.from) / (width - gutter), at = time(px);
    let found = -1, least = slack;
    for (let i = firstAfter(lane, at - slack); i < state.lanes[lane][1] && state.step.start[i] <= at + slack; i++) {
      const away = Math.max(0, state.step.start[i] - at, at - state.step.start[i] - state.step.took[i]);
      if (found < 0 || away < least) { found = i; least = away; }
    }
    return found;
  }

  // ---- drawing

  function ask() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; draw(); });
  }

  function takeColours() {
    for (const name of ["page", "text", "soft", "line", "panel", "forward", "backward", "update", "other", "hidden",
      "exposed", "critical", "on-light", "on-dark", "accent"]) colours[name] = drawing.colour(name);
    hatch = drawing.stripes(context);
    ask();
  }

  function resize() {
    width = canvas.clientWidth;
    gutter = width < 600 ? 88 : 150;
    const height = AXIS + Math.max(1, state.lanes.length) * LANE + 4, ratio = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    ask();
  }

  function kindOf(i) {
    const kind = data.kinds[state.step.kind[i]];
    return drawing.kind(kind, COMPUTE.has(kind) && data.streams[state.step.lanes[state.step.lane[i]][1]] === "compute");
  }

  function draw() {
    const began = performance.now(), height = canvas.clientHeight;
    context.fillStyle = colours.page;
    context.fillRect(0, 0, width, height);
    state.drawn = 0;
    drawAxis(height);
    context.save();
    context.beginPath();
    context.rect(gutter, 0, width - gutter, height);
    context.clip();
    for (let lane = 0; lane < state.lanes.length; lane++) drawLane(lane);
    if (state.critical) drawPath();
    drawArrows();
    for (const [i, name] of [[state.hovered, "soft"], [state.selected, "accent"]]) if (i >= 0) outline(i, colours[name]);
    context.restore();
    drawNames();
    state.frameMs = performance.now() - began;
  }

  function drawLane(lane) {
    const { start, took, exposed } = state.step, y = top(lane) + 2, tall = LANE - 4;
    const scale = (width - gutter) / (state.to - state.from);
    let right = -1, isExposed = false;
    const alpha = isPredicted(lane) ? 0.6 : 1;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let i = firstAfter(lane, state.from); i < state.lanes[lane][1] && start[i] < state.to; i++) {
      const left = gutter + (start[i] - state.from) * scale, long = took[i] * scale;
      const stood = exposed[i] > data.stoodStill ? Math.min(exposed[i], took[i]) : 0;
      // What lies in the pixel that was painted last would not be seen, unless a rank stood still for it.
      if (left + long < right && (isExposed || !stood)) continue;
      const kind = kindOf(i);
      const wide = Math.max(1, long);
      context.globalAlpha = alpha;
      context.fillStyle = colours[kind];
      context.fillRect(left, y, wide, tall);
      if (stood > 0) {
        context.fillStyle = hatch;
        context.fillRect(left + wide - Math.max(1, stood * scale), y, Math.max(1, stood * scale), tall);
      }
      if (wide > 3) { context.strokeStyle = colours.page; context.lineWidth = 1; context.strokeRect(left, y, wide, tall); }
      context.globalAlpha = 1;
      if (wide > 16) label(i, left, wide, y + tall / 2, kind, stood > 0 || alpha < 1);
      right = Math.max(right, left + 1);
      isExposed = stood > 0;
      state.drawn++;
    }
  }

  function label(i, left, wide, y, kind, plate) {
    const seen = Math.max(left, gutter), room = Math.min(left + wide, width) - seen - 8;
    const short = { forward: "F ", backward: "B " }[kind] || "";
    let text = short + data.names[state.step.name[i]].replace(/^bucket /, "");
    if (context.measureText(text).width > room) {
      text = text.slice(0, Math.floor(text.length * room / context.measureText(text).width) - 1) + "…";
      if (text.length < 3) return;
    }
    // Stripes that a name would hide say more than the name.
    if (plate && context.measureText(text).width + 4 > 0.5 * wide) return;
    if (plate) { context.fillStyle = colours.page; context.fillRect(seen + 2, y - 7, context.measureText(text).width + 4, 14); }
    context.fillStyle = plate ? colours.text : kind === "backward" ? colours["on-dark"] : colours["on-light"];
    context.fillText(text, seen + 4, y + 0.5);
  }

  function drawAxis(height) {
    const span = state.to - state.from, rough = span / Math.max(2, (width - gutter) / 90);
    const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((k) => k * power >= rough) * power;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.lineWidth = 1;
    for (let at = Math.ceil(state.from / step) * step; at <= state.to; at += step) {
      context.strokeStyle = colours.line;
      context.beginPath();
      context.moveTo(x(at), AXIS - 5);
      context.lineTo(x(at), height);
      context.stroke();
      context.fillStyle = colours.soft;
      const text = at === 0 || Math.abs(at) < step / 1e6 ? "0" : drawing.microseconds(at);
      if (x(at) + context.measureText(text).width / 2 < width && x(at) > gutter - 1) {
        context.fillText(text, x(at) - context.measureText(text).width / 2, AXIS / 2 - 1);
      }
    }
  }

  function drawNames() {
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = colours.page;
    context.fillRect(0, AXIS, gutter - 1, canvas.clientHeight);
    let before = -1;
    for (const lane of state.order) {
      const [rank, stream] = state.step.lanes[lane], name = data.streams[stream], foretold = isPredicted(lane);
      if (before >= 0 && before !== rank) {
        context.strokeStyle = colours.soft;
        context.beginPath();
        context.moveTo(0, top(lane));
        context.lineTo(width, top(lane));
        context.stroke();
      }
      context.fillStyle = before !== rank ? colours.text : colours.soft;
      context.font = `${foretold ? "italic " : ""}12px system-ui, sans-serif`;
      const long = width < 600 ? `${rank} ${name}` : `rank ${rank} ${name}`;
      context.fillText(foretold ? long + (width < 600 ? " (p)" : ", predicted") : long, 4, top(lane) + LANE / 2, gutter - 8);
      before = rank;
    }
  }

  function drawPath() {
    context.strokeStyle = colours.critical;
    context.lineWidth = 3;
    context.beginPath();
    let last = null;
    for (const [from, to, lane] of state.step.path) {
      if (lane < 0) continue;
      const y = top(lane) + LANE - 3;
      if (last !== null && last !== y) { context.moveTo(x(from), last); context.lineTo(x(from), y); }
      context.moveTo(x(from), y);
      context.lineTo(x(to), y);
      last = y;
    }
    context.stroke();
  }

  function drawArrows() {
    const focus = state.hovered >= 0 ? state.hovered : state.selected;
    if (focus < 0) return;
    for (const [from, at, to, then] of arrowsOf(focus)) arrow(x(at), middle(from), x(then), middle(to));
  }

  const middle = (i) => top(state.step.lane[i]) + LANE / 2;

  // What an op waited for, and what waited for it: [op, when, op, when].
  function arrowsOf(i) {
    const { meeting, lastEvent, came, start, took, next } = state.step, found = [];
    if (meeting[i] >= 0 && lastEvent[meeting[i]] >= 0) {
      const last = lastEvent[meeting[i]];
      meeting.forEach((each, j) => {
        if (each === meeting[i] && j !== last && (i === last || i === j)) found.push([last, came[each], j, came[each]]);
      });
    }
    for (const [from, to] of next) {
      if (from === i || to === i) found.push([from, start[from] + took[from], to, Math.max(start[to], start[from] + took[from])]);
    }
    return found;
  }

  function arrow(x1, y1, x2, y2) {
    const angle = Math.atan2(y2 - y1, x2 - x1);
    context.strokeStyle = context.fillStyle = colours.text;
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
    context.beginPath();
    context.moveTo(x2, y2);
    for (const turn of [2.7, -2.7]) context.lineTo(x2 + 8 * Math.cos(angle + turn), y2 + 8 * Math.sin(angle + turn));
    context.fill();
  }

  function outline(i, colour) {
    context.strokeStyle = colour;
    context.lineWidth = 2;
    const left = x(state.step.start[i]);
    context.strokeRect(left, top(state.step.lane[i]) + 1, Math.max(2, x(state.step.start[i] + state.step.took[i]) - left), LANE - 2);
  }

  // ---- words

  function describe(i) {
    const step = state.step, [rank, stream] = step.lanes[step.lane[i]], kind = data.kinds[step.kind[i]];
    const took = drawing.microseconds;
    const parameters = COMPUTE.has(kind) ? "" : new Map(Object.entries(data.parameters)).get(data.names[step.name[i]]);
    const parts = [
      `${isPredicted(step.lane[i]) ? "predicted: " : ""}${kind} of ${data.names[step.name[i]]}`,
      `rank ${rank}, ${data.streams[stream]}` + (step.microBatch[i] >= 0 ? `, micro-batch ${step.microBatch[i]}` : ""),
      `from ${took(step.start[i])}, takes ${took(step.took[i])}`,
    ];
    if (step.unplanned.includes(i)) parts.push("not in the schedule of every step");
    if (step.bytes[i]) parts.push(`a buffer of ${drawing.bytes(step.bytes[i])}, of which this rank sent ${drawing.bytes(step.sent[i])}`);
    if (parameters) parts.push(`parameters ${parameters}`);
    const meeting = step.meeting[i];
    if (meeting >= 0) {
      const waited = step.came[meeting] - step.start[i];
      const speed = step.busBandwidth[meeting];
      if (speed !== null) parts.push(`busbw ${drawing.rate(speed)}`);
      parts.push(step.last[meeting] === rank || waited <= 0
        ? "this rank came last" : `rank ${step.last[meeting]} came last, ${took(waited)} later`);
      parts.push(step.exposed[i] > data.stoodStill ? `the rank stood still for it for ${took(step.exposed[i])}` : "hidden behind computing");
    }
    return parts.join("; ") + ".";
  }

  function tell() {
    const focus = state.hovered >= 0 ? state.hovered : state.selected;
    details.textContent = focus >= 0 ? describe(focus) : HINT;
    ask();
  }

  // ---- the hand and the keyboard

  const pointers = new Map();
  let dragged = 0;

  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture(event.pointerId);
    dragged = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) {
      hover(opAt(event.offsetX, event.offsetY));
      return;
    }
    const before = [...pointers.values()], was = pointers.get(event.pointerId);
    pointers.set(event.pointerId, event.offsetX);
    const now = [...pointers.values()];
    dragged += Math.abs(event.offsetX - was);
    if (now.length === 1) pan((was - event.offsetX) / (width - gutter));
    else if (now.length === 2) {
      const apart = Math.abs(now[0] - now[1]);
      if (apart > 10) zoom(Math.abs(before[0] - before[1]) / apart, time((now[0] + now[1]) / 2));
    }
  });
  for (const kind of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(kind, (event) => {
      if (pointers.delete(event.pointerId) && kind === "pointerup" && dragged < 4) {
        state.selected = opAt(event.offsetX, event.offsetY);
        tell();
      }
    });
  }
  canvas.addEventListener("pointerleave", () => hover(-1));
  canvas.addEventListener("dblclick", (event) => zoom(0.4, time(event.offsetX)));
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey) zoom(Math.exp(event.deltaY / 300), time(event.offsetX));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / (width - gutter));
    else return;
    event.preventDefault();
  }, { passive: false });

  function hover(i) {
    if (i === state.hovered) return;
    state.hovered = i;
    tell();
  }

  function select(i) {
    state.selected = i;
    state.hovered = -1;
    const { start, took } = state.step, span = state.to - state.from;
    if (start[i] + took[i] < state.from || start[i] > state.to) look(start[i] - span / 2, start[i] + span / 2);
    tell();
  }

  function neighbour(by) {
    const i = state.selected;
    if (i < 0) return select(firstVisible());
    const [low, high] = state.lanes[state.step.lane[i]];
    return select(Math.min(high - 1, Math.max(low, i + by)));
  }

  function firstVisible() {
    const lane = state.order[0];
    return Math.min(firstAfter(lane, state.from), state.lanes[lane][1] - 1);
  }

  function changeLane(by) {
    const i = state.selected >= 0 ? state.selected : firstVisible();
    const lane = state.order[Math.min(state.order.length - 1, Math.max(0, state.row[state.step.lane[i]] + by))];
    select(Math.min(firstAfter(lane, state.step.start[i]), state.lanes[lane][1] - 1));
  }

  function toggleCritical() {
    state.critical = !state.critical;
    document.getElementById("critical").setAttribute("aria-pressed", String(state.critical));
    ask();
  }

  function togglePrediction() {
    state.predictions = !state.predictions;
    document.getElementById("predicted").setAttribute("aria-pressed", String(state.predictions));
    show(state.index);
  }

  const keys = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": whole,
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => changeLane(-1), ArrowDown: () => changeLane(1),
    n: () => neighbour(1), p: () => neighbour(-1), c: toggleCritical,
    Escape: () => { state.selected = -1; tell(); },
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey || !state.step.start.length) return;
    event.preventDefault();
    act();
  });
  document.getElementById("zoom-in").addEventListener("click", () => zoom(0.5));
  document.getElementById("zoom-out").addEventListener("click", () => zoom(2));
  document.getElementById("whole-step").addEventListener("click", whole);
  document.getElementById("critical").addEventListener("click", toggleCritical);
  document.getElementById("predicted").addEventListener("click", togglePrediction);
  picker.addEventListener("change", () => show(Number(picker.value)));
  new ResizeObserver(resize).observe(canvas.parentElement);
  drawing.onChange(takeColours);

  takeColours();
  show(data.typical);
  const boxOf = (i) => ({ x: x(state.step.start[i] + state.step.took[i] / 2), y: middle(i) });
  return { data, state, draw, describe, boxOf, look };
})();
