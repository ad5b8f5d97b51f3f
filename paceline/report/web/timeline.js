"use strict";
// The timeline: one lane per rank and stream on a canvas; which step and which part of it is shown, by hand and keyboard,
// and what is said of an op.
const timeline = (() => {
  const source = document.getElementById("timeline-data");
  if (!source) return null;
  const data = JSON.parse(source.textContent);
  const canvas = document.getElementById("lanes");
  const details = document.getElementById("details");
  const picker = document.getElementById("step");
  const HINT = details.textContent;

  const state = {
    step: null, index: -1, from: 0, to: 1, length: 1, selected: -1, hovered: -1, critical: false,
    predictions: Boolean(data.predicted), lanes: [], order: [], row: [], drawn: 0,
    frameMs: 0,
  };
  const picture = timelinePicture(canvas, data, state);
  const { ask, boxOf, computes, draw, firstAfter, isPredicted, opAt, resize, shareOf, takeColours, time } = picture;

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

  // ---- words

  function describe(i) {
    const step = state.step, [rank, stream] = step.lanes[step.lane[i]], kind = data.kinds[step.kind[i]];
    const took = drawing.microseconds;
    const parameters = computes(kind) ? "" : new Map(Object.entries(data.parameters)).get(data.names[step.name[i]]);
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
    if (now.length === 1) pan(shareOf(was - event.offsetX));
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
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(shareOf(event.deltaX));
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
  return { data, state, draw, describe, boxOf, look };
})();
