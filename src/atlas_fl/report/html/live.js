"use strict";
(() => {
  const EVERY = 2000;
  let first = null;
  async function look() {
    try {
      const answer = await fetch(`${location.pathname}?state`, { cache: "no-store" });
      const state = await answer.text();
      document.title = document.title.replace(/^\(not watched\) /, "");
      if (answer.ok && first !== null && state !== first) location.reload();
      if (answer.ok) first ??= state;
    } catch {
      if (!document.title.startsWith("(not watched) ")) document.title = `(not watched) ${document.title}`;
    }
  }
  look();
  setInterval(look, EVERY);
})();
