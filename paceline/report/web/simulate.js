"use strict";
// What a program would take: the same as core/simulate.py says, of ops as columns.
const simulation = (() => {
  // Ops of one stream run one after another; each starts when its stream is free, all that it comes after is complete,
  // and the compute ops of the step before are over. Places below 0 are of the step before. Times of the last step, and
  // of the one before it.
  function simulate(program, costs, steps) {
    const { stream, after, computes } = program, count = stream.length;
    let before = null, computed = 0;
    const free = [];
    for (let step = 0; step < steps; step++) {
      const now = { start: [], end: [], exposed: new Array(count).fill(0), began: computed, before };
      for (let i = 0; i < count; i++) {
        const available = Math.max(free[stream[i]] || 0, computed);
        let start = available;
        const waits = [];
        for (const place of after[i]) {
          const of = place < 0 ? before : now, j = place < 0 ? -1 - place : place;
          if (!of) continue;
          start = Math.max(start, of.end[j]);
          if (computes[i] && stream[j] !== 0) waits.push([of, j]);
        }
        let until = available;
        for (const [of, j] of waits) {
          if (of.end[j] > until) { of.exposed[j] += of.end[j] - until; until = of.end[j]; }
        }
        now.start.push(start);
        now.end.push(start + costs[i]);
        free[stream[i]] = now.end[i];
      }
      if (before) before.before = null;
      before = now;
      computed = free[0] || 0;
    }
    return before;
  }

  // The last step once steps follow each other, as report/what_if.py's last_step.
  function predict(program, costs, steps) {
    const last = simulate(program, costs, steps);
    const own = program.stream.map((_, i) => i).filter((i) => program.stream[i] === 0);
    const first = Math.min(...own.map((i) => last.start[i])), end = Math.max(...own.map((i) => last.end[i]));
    const busy = own.reduce((sum, i) => sum + last.end[i] - last.start[i], 0);
    return { last, seconds: end - last.began, span: end - first, exposed: Math.max(0, end - last.began - busy) };
  }

  return { simulate, predict };
})();
