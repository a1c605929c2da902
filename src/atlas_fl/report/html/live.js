"use strict";
(() => {
  const EVERY = 2000, LOST = "(not watched) ";
  const shown = document.documentElement.dataset.state;
  async function look() {
    let state = null;
    try {
      const answer = await fetch(`${location.pathname}?state`, { cache: "no-store" });
      if (answer.ok) state = await answer.text();
    } catch {
      state = null;
    }
    if (state !== null && state !== shown) location.reload();
    document.title = (state === null ? LOST : "") + document.title.replace(LOST, "");
  }
  look();
  setInterval(look, EVERY);
})();
