"use strict";
// What the timeline draws: where a time and a lane lie on the canvas, and ops, axis, names and arrows there. Only what is
// in view is drawn, and of ops narrower than a pixel one, so that a step of 100,000 ops moves smoothly.
const timelinePicture = (canvas, data, state) => {
  const context = canvas.getContext("2d");
  const LANE = 22, AXIS = 24;
  const COMPUTE = new Set(["forward", "backward", "update", "unshard", "reshard", "copy_in", "statistics", "publish", "cast"]);
  let colours = {}, hatch = null, pending = false, width = 0, gutter = 0;

  const computes = (kind) => COMPUTE.has(kind);
  const isPredicted = (lane) => state.step.lanes[lane].length > 2;

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
    return drawing.kind(kind, computes(kind) && data.streams[state.step.lanes[state.step.lane[i]][1]] === "compute");
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

  const boxOf = (i) => ({ x: x(state.step.start[i] + state.step.took[i] / 2), y: middle(i) });
  // By which share of what is in view so many pixels move it.
  const shareOf = (pixels) => pixels / (width - gutter);
  return { ask, boxOf, computes, draw, firstAfter, isPredicted, opAt, resize, shareOf, takeColours, time };
};
