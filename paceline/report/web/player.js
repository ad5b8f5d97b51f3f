"use strict";
// Steps through moments: buttons, a slider and keys. Nothing moves by itself until it is asked to.
const players = (() => {
  // `count()` moments, of which `show(index)` draws one and returns what has happened in words; playing shows each for
  // so many milliseconds.
  function player(name, count, show, pause = 1400) {
    const root = document.getElementById(name), slider = root.querySelector("input"), told = root.querySelector(".told");
    const play = root.querySelector("[data-act=play]");
    let index = 0, timer = 0;

    function go(to) {
      index = Math.min(Math.max(to, 0), count() - 1);
      slider.max = count() - 1;
      slider.value = index;
      told.textContent = `${index + 1} of ${count()}: ${show(index)}`;
      slider.setAttribute("aria-valuetext", told.textContent);
      root.querySelector("[data-act=back]").disabled = root.querySelector("[data-act=first]").disabled = index === 0;
      root.querySelector("[data-act=next]").disabled = root.querySelector("[data-act=last]").disabled = index === count() - 1;
      if (index === count() - 1) stop();
    }

    function stop() {
      clearInterval(timer);
      timer = 0;
      play.textContent = "Play";
      play.setAttribute("aria-pressed", "false");
    }

    function toggle() {
      if (timer) return stop();
      if (index === count() - 1) go(0);
      timer = setInterval(() => go(index + 1), pause);
      play.textContent = "Pause";
      play.setAttribute("aria-pressed", "true");
    }

    // Whoever steps has taken over.
    const step = (to) => { stop(); go(to); };
    const acts = { first: () => step(0), back: () => step(index - 1), next: () => step(index + 1), last: () => step(count() - 1), play: toggle };
    const keys = { ArrowLeft: acts.back, ArrowRight: acts.next, Home: acts.first, End: acts.last, " ": toggle };
    root.addEventListener("click", (event) => {
      const act = event.target.dataset.act;
      if (act) acts[act]();
    });
    root.addEventListener("keydown", (event) => {
      // A button does by itself what the space bar asks of it.
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey || (event.key === " " && event.target.dataset.act)) return;
      event.preventDefault();
      keys[event.key]();
    });
    slider.addEventListener("input", () => step(Number(slider.value)));
    go(0);
    return { go: step, index: () => index, isPlaying: () => timer !== 0 };
  }

  return { player };
})();
