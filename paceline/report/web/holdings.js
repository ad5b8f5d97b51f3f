"use strict";
// The run's own step: what each rank holds of each bucket at a moment, as boxes on a canvas.
const holdings = (() => {
  const source = document.getElementById("holdings-data");
  if (!source) return null;
  const data = JSON.parse(source.textContent);
  const canvas = document.getElementById("holdings-drawn"), picker = document.getElementById("holdings-way");
  const context = canvas.getContext("2d");
  const ROW = 40, HEAD = 22, MOST_ROWS = 12, NOTHING = ".", UPDATED = "u";
  const moments = () => data.ways[picker ? Number(picker.value) : 0];
  let shown = null, width = 0;

  // ---- what is held

  // Of each bucket, after so many moments: [filled, gradients, reduced, parameters].
  function heldAt(index) {
    const held = [];
    for (const [, , changes] of moments().slice(0, index + 1)) {
      for (const [bucket, ...state] of changes) held[bucket] = state;
    }
    return held;
  }

  // Of one bucket, after so many moments: by rank and chunk, whose gradients are added up, their norm, and whether
  // that has just changed.
  function summedAt(index, bucket) {
    const summed = Array.from({ length: data.ranks }, () => []);
    moments().slice(0, index + 1).forEach(([, , , sums], i) => {
      for (const [of, rank, chunk, ranks, norm] of sums) if (of === bucket) summed[rank][chunk] = [ranks, norm, i === index];
    });
    return summed;
  }

  function element(name, text, more = {}) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(more)) made.setAttribute(key, value);
    return made;
  }

  function showNorms(index, bucket) {
    const place = document.getElementById("holdings-norms");
    if (!place) return;
    const summed = summedAt(index, bucket), name = data.buckets[bucket][0], heads = element("tr"), rows = element("tbody");
    const columns = Array.from({ length: data.chunks }, (_, c) => `chunk ${c}`);
    if (shown.now[bucket][2]) columns.push("sums of its shard");
    heads.append(element("th", "", { scope: "col" }), ...columns.map((text) => element("th", text, { scope: "col" })));
    summed.forEach((chunks, rank) => {
      const row = element("tr");
      row.append(element("th", `rank ${rank}`, { scope: "row" }));
      columns.forEach((_, c) => {
        const [ranks, norm, isNew] = chunks[c] || ["", null, false];
        const cell = element("td", ranks === "" ? "–" : norm === null ? "not known" : norm.toPrecision(4), isNew && ranks !== "" ? { class: "changed" } : {});
        if (ranks !== "") cell.append(element("small", ` of ${ranks}`));
        row.append(cell);
      });
      rows.append(row);
    });
    const table = element("table"), top = element("thead");
    top.append(heads);
    table.append(element("caption", `Norms of the gradients in each chunk of ${name}, and of which ranks they are; what has just changed is in a frame`), top, rows);
    place.replaceChildren(table);
  }

  function show(index) {
    const [told, at, changes] = moments()[index];
    const before = shown && index > 0 ? heldAt(index - 1) : heldAt(index);
    const busy = changes.length && index > 0 ? changes[changes.length - 1][0] : shown && index > 0 ? shown.busy : 0;
    shown = { now: heldAt(index), before, busy };
    canvas.setAttribute("aria-label", `${told} ${inWords(busy)}`);
    draw();
    showNorms(index, busy);
    return told + (at === null || index === 0 ? "" : ` By the prediction this is ${drawing.microseconds(at)} into the step.`);
  }

  // What rank 0 holds of a bucket.
  function inWords(bucket) {
    const [filled, gradients, reduced, parameters] = shown.now[bucket], of = (chunks) => [...chunks.slice(0, data.chunks)];
    const counts = of(gradients).map((c) => (c === NOTHING ? "none" : `${parseInt(c, 36)}`)).join(", ");
    const held = of(parameters).filter((c) => c !== NOTHING).length, updated = of(parameters).filter((c) => c === UPDATED).length;
    return `Rank 0 holds of ${data.buckets[bucket][0]}, which is filled to ${filled} %: gradients, by chunk, of so many ranks: ${counts}; `
      + (reduced && reduced[0] !== NOTHING ? `sums of its shard of ${parseInt(reduced[0], 36)} ranks; ` : "")
      + `parameters of ${held} of ${data.chunks} chunks, ${updated} of them updated.`;
  }

  // ---- drawing

  function draw() {
    const rows = Math.min(MOST_ROWS, data.buckets.length), ratio = window.devicePixelRatio || 1;
    // The bucket that is busy stays in view.
    const first = Math.max(0, Math.min(data.buckets.length - rows, shown.busy - (rows >> 1)));
    width = canvas.clientWidth;
    const height = HEAD + rows * ROW + (rows < data.buckets.length ? 18 : 4);
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const pens = {};
    for (const name of ["page", "text", "soft", "line", "panel", "forward", "backward", "update", "hidden", "accent", "on-light", "on-dark"]) pens[name] = drawing.colour(name);
    context.fillStyle = pens.page;
    context.fillRect(0, 0, width, height);
    context.textBaseline = "middle";
    const gutter = width < 600 ? 92 : 190, cell = (width - gutter - 4) / data.ranks;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = pens.soft;
    for (let rank = 0; rank < data.ranks; rank++) put(cell > 45 ? `rank ${rank}` : `${rank}`, gutter + rank * cell + 2, HEAD / 2, cell - 4);
    for (let row = 0; row < rows; row++) drawBucket(first + row, HEAD + row * ROW, gutter, cell, pens);
    if (rows < data.buckets.length) {
      context.fillStyle = pens.soft;
      put(`buckets ${first + 1} to ${first + rows} of ${data.buckets.length}`, 2, height - 9, width - 4);
    }
  }

  function drawBucket(bucket, y, gutter, cell, pens) {
    const [name, size, units] = data.buckets[bucket];
    if (bucket === shown.busy) { context.fillStyle = pens.panel; context.fillRect(0, y, width, ROW - 2); }
    context.font = "600 12px system-ui, sans-serif";
    context.fillStyle = pens.text;
    put(name, 2, y + 11, gutter - 8);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = pens.soft;
    put(`${size}: ${units}`, 2, y + 27, gutter - 8);
    const [filled, gradients, reduced, parameters] = shown.now[bucket], before = shown.before[bucket], n = data.chunks;
    for (let rank = 0; rank < data.ranks; rank++) {
      const left = gutter + rank * cell + 1, apart = reduced ? Math.min(18, 0.25 * cell) : 0;
      const wide = (cell - 5 - apart) / n, from = rank * n;
      for (let c = 0; c < n; c++) {
        const i = from + c, x = left + c * wide;
        box(x, y + 3, wide, 18, gradients[i], before[1][i], pens, gradients[i] === NOTHING ? null : count(gradients[i]));
        box(x, y + 23, wide, 12, parameters[i], before[3][i], pens, parameters[i] === UPDATED ? "✓" : null, true);
      }
      // A bucket that fills has gradients of some of its parameters.
      if (filled > 0 && gradients[from] === NOTHING) {
        context.fillStyle = pens.forward;
        context.fillRect(left + 1, y + 4, (n * wide - 3) * filled / 100, 16);
        context.fillStyle = pens["on-light"];
        if (n * wide > 34) put(`${filled} %`, left + 4, y + 12, n * wide - 6);
        if (before[0] !== filled) frame(left, y + 3, n * wide - 1, 18, pens);
      }
      if (reduced) box(left + n * wide + 1, y + 3, apart, 18, reduced[rank], before[2][rank], pens, reduced[rank] === NOTHING ? null : count(reduced[rank]));
    }
  }

  const count = (held) => (parseInt(held, 36) === data.ranks ? "Σ" : `${parseInt(held, 36)}`);

  // One chunk: empty, or filled the darker the more ranks' gradients are in it.
  function box(x, y, wide, tall, held, was, pens, text, isParameters = false) {
    context.fillStyle = held === NOTHING ? pens.page : isParameters ? (held === UPDATED ? pens.update : pens.line) : held === "1" ? pens.forward : text === "Σ" ? pens.backward : pens.hidden;
    context.fillRect(x, y, wide - 1, tall);
    context.strokeStyle = pens.line;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, wide - 2, tall - 1);
    if (text && wide > 10) {
      context.fillStyle = text === "Σ" ? pens["on-dark"] : pens["on-light"];
      context.fillText(text, x + (wide - context.measureText(text).width) / 2 - 0.5, y + tall / 2 + 0.5);
    }
    if (held !== was && held !== NOTHING) frame(x, y, wide - 1, tall, pens);
  }

  function frame(x, y, wide, tall, pens) {
    context.strokeStyle = pens.text;
    context.lineWidth = 2;
    context.strokeRect(x + 1, y + 1, wide - 2, tall - 2);
  }

  function put(text, x, y, room) {
    const long = context.measureText(text).width;
    context.fillText(long > room ? text.slice(0, Math.max(1, Math.floor(text.length * room / long) - 1)) + "…" : text, x, y);
  }

  const player = players.player("holdings", () => moments().length, show, 700);
  if (picker) picker.addEventListener("change", () => player.go(0));
  new ResizeObserver(() => { if (canvas.clientWidth !== width) draw(); }).observe(canvas.parentElement);
  drawing.onChange(draw);
  return { data, player, shown: () => shown };
})();
