// Asks for the page again every few seconds and puts what changed into <main>, so that focus, scrolling, selected text and what
// is unfolded stay. Where the exporter does not answer the values are marked as old: without this script they would stand
// there as if they were of now.
"use strict";

(() => {
  const EVERY = 5000;
  const root = document.documentElement;
  const held = document.querySelector("main");
  const old = document.getElementById("old");
  let answered = Date.now();
  let asking = false;

  // A card that hangs costs a page the settings' whole deadline.
  const patience = () => 1000 * Number(held.dataset.deadline) + 3000;

  const mark = () => {
    if (!root.classList.contains("old")) {
      const since = new Date(answered).toLocaleTimeString([], { hour12: false });
      old.textContent = `The exporter has not answered since ${since}. What stands below is from then.`;
      root.classList.add("old");
    }
  };

  const unmark = () => {
    old.textContent = "";
    root.classList.remove("old");
  };

  const judge = () => {
    if (Date.now() - answered > EVERY + patience()) {
      mark();
    }
  };

  const attributes = (to, from) => {
    const kept = (name) => to.nodeName === "DETAILS" && name === "open"; // whoever looks decides that
    for (const { name } of [...to.attributes]) {
      if (!from.hasAttribute(name) && !kept(name)) {
        to.removeAttribute(name);
      }
    }
    for (const { name, value } of from.attributes) {
      if (to.getAttribute(name) !== value && !kept(name)) {
        to.setAttribute(name, value);
      }
    }
  };

  const alike = (one, other) => one.nodeName === other.nodeName && (one.id || "") === (other.id || "");

  const become = (to, from) => {
    if (to.nodeType === Node.TEXT_NODE) {
      if (to.data !== from.data) {
        to.data = from.data;
      }
      return;
    }
    attributes(to, from);
    const wanted = new Set([...from.children].map((child) => child.id));
    const known = new Map();
    for (const child of [...to.children]) {
      if (child.id && wanted.has(child.id)) {
        known.set(child.id, child);
      } else if (child.id) {
        child.remove();
      }
    }
    let at = to.firstChild;
    for (const node of [...from.childNodes]) {
      const same = known.get(node.id);
      if (same && same !== at) {
        to.insertBefore(same, at);
        at = same;
      }
      if (at && alike(at, node)) {
        become(at, node);
        at = at.nextSibling;
      } else {
        to.insertBefore(node, at);
      }
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  };

  const refresh = async () => {
    if (asking || document.hidden) {
      return;
    }
    asking = true;
    try {
      const options = { cache: "no-store", redirect: "error", signal: AbortSignal.timeout(patience()) };
      const answer = await fetch(location.pathname, options);
      const fresh = new DOMParser().parseFromString(answer.ok ? await answer.text() : "", "text/html");
      const main = fresh.querySelector("main");
      if (!main) {
        mark();
      } else if (fresh.documentElement.dataset.version !== root.dataset.version) {
        location.reload(); // this script is another version's
      } else {
        become(held, main);
        answered = Date.now();
        unmark();
      }
    } catch {
      mark();
    } finally {
      asking = false;
    }
  };

  const look = () => {
    if (!document.hidden) {
      judge();
      refresh();
    }
  };

  setInterval(refresh, EVERY);
  setInterval(judge, 1000);
  document.addEventListener("visibilitychange", look);
  window.addEventListener("pageshow", (event) => event.persisted && look());
  window.addEventListener("offline", mark);
})();
