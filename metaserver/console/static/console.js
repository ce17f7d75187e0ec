"use strict";
// Every page works without this script. It renews parts of a page, labels the cells of narrow tables, and draws JSON as a tree.

const RENEW_MS = 5000;

// On a telephone a row becomes a card; each cell then shows the heading of its column.
function label(root) {
  for (const table of root.querySelectorAll("table:not(.pairs)")) {
    const names = [...table.querySelectorAll("thead th")].map(cell => cell.textContent.trim());
    if (!names.length || table.querySelector("[rowspan]")) continue;
    table.classList.add("cards");
    for (const row of table.tBodies[0]?.rows ?? [])
      [...row.cells].forEach((cell, at) => {
        if (cell.tagName !== "TD" || cell.colSpan > 1) return;
        cell.dataset.label = names[at] ?? "";
        cell.classList.toggle("blank", ["", "–"].includes(cell.textContent.trim()) && !cell.querySelector("svg, a, input"));
      });
  }
}

// A reader keeps the part that holds the focus or the selection.
function isInUse(part) {
  const selection = document.getSelection();
  return part.contains(document.activeElement) || (selection && !selection.isCollapsed && part.contains(selection.anchorNode));
}

function renew(part) {
  const pause = document.createElement("button");
  pause.type = "button";
  pause.className = "quiet small";
  pause.textContent = "Pause";
  pause.setAttribute("aria-pressed", "false");
  const isPaused = () => pause.getAttribute("aria-pressed") === "true";
  pause.addEventListener("click", () => {
    pause.setAttribute("aria-pressed", String(!isPaused()));
    pause.textContent = isPaused() ? "Continue" : "Pause";
  });
  part.after(pause);
  setInterval(async () => {
    if (document.hidden || isPaused() || isInUse(part)) return;
    try {
      const answer = await fetch(part.dataset.renew, { redirect: "error" });
      if (!answer.ok || isPaused() || isInUse(part)) return;
      part.innerHTML = await answer.text(); // the server escapes it, as it does the page
      label(part);
    } catch { /* the next request may succeed */ }
  }, RENEW_MS);
}

label(document);
document.querySelectorAll("[data-renew]").forEach(renew);

// JSON as a tree. A text that is JSON itself becomes a branch, as brokers keep properties as text.
const PARSED_CHARS_MAX = 200000, BRANCHES_MAX = 200, DEPTH_MAX = 20, CHARS_OPEN = 300, BRANCHES_OPEN = 12;
const ACTIVE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff0-\ufffb\u{e0000}-\u{e0fff}]/gu;

// Characters that change the direction of writing, or cannot be seen, as escapes (qmq.message_view.visible).
const visible = text => text.replace(ACTIVE, found => [...Array(found.length).keys()]
  .map(at => `\\u${found.charCodeAt(at).toString(16).padStart(4, "0")}`).join(""));

// A number with more digits than JavaScript keeps stays as it was written.
class Digits { constructor(text) { this.text = text; } }
const isExact = (number, text) => String(number) === text || Number.isFinite(number) && !/\d{16}/.test(text.replace(".", ""));

function parsed(text) {
  const inner = text.trim();
  if (!/^[[{]/.test(inner) || inner.length > PARSED_CHARS_MAX) return undefined;
  let isWhole = true;
  try {
    const value = JSON.parse(inner, (_, item, context) => {
      if (typeof item !== "number") return item;
      if (context === undefined) isWhole = isWhole && (Number.isSafeInteger(item) || !Number.isInteger(item));
      return context === undefined || isExact(item, context.source) ? item : new Digits(context.source);
    });
    return isWhole ? value : undefined;
  } catch { return undefined; }
}

function leaf(value) {
  const shown = document.createElement("span");
  const isNumber = typeof value === "number" || value instanceof Digits;
  shown.className = typeof value === "string" ? "text" : isNumber ? "number" : "word";
  shown.textContent = typeof value === "string" ? visible(value) : value instanceof Digits ? value.text : String(value);
  return shown;
}

const isBranch = value => value !== null && typeof value === "object" && !(value instanceof Digits);
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

function branch(value, depth, isShort) {
  const list = document.createElement("ul");
  const entries = Object.entries(value);
  for (const [name, item] of entries.slice(0, BRANCHES_MAX)) {
    const row = document.createElement("li"), key = document.createElement("span");
    const inner = typeof item === "string" ? parsed(item) ?? item : item;
    key.className = "key";
    key.textContent = `${visible(name)}: `;
    if (isBranch(inner) && depth < DEPTH_MAX) {
      const fold = document.createElement("details"), head = document.createElement("summary");
      fold.open = isShort || depth < 1 && entries.length <= BRANCHES_OPEN && Object.keys(inner).length <= BRANCHES_OPEN;
      const count = document.createElement("span");
      count.className = "dim";
      count.textContent = counted(Object.keys(inner).length, Array.isArray(inner) ? "item" : "field");
      head.append(key, count);
      fold.append(head, branch(inner, depth + 1, isShort));
      row.append(fold);
    } else row.append(key, leaf(isBranch(inner) ? JSON.stringify(inner) : inner));
    list.append(row);
  }
  if (entries.length > BRANCHES_MAX) {
    const rest = document.createElement("li");
    rest.textContent = `and ${entries.length - BRANCHES_MAX} more`;
    list.append(rest);
  }
  return list;
}

function drawTrees(root) {
  for (const text of root.querySelectorAll("pre[data-json]")) {
    const value = parsed(text.textContent);
    if (value === undefined) continue;
    const tree = branch(value, 0, text.textContent.length <= CHARS_OPEN);
    tree.className = `tree ${text.className}`;
    text.replaceWith(tree);
  }
}

// The live tail: adds messages that are new, the newest first.
const TAIL_MS = 1500, KEPT_MAX = 200;

function follow(list) {
  const pause = document.createElement("button");
  pause.type = "button";
  pause.className = "quiet small";
  pause.textContent = "Pause";
  pause.addEventListener("click", () => {
    const isPaused = pause.getAttribute("aria-pressed") !== "true";
    pause.setAttribute("aria-pressed", String(isPaused));
    pause.textContent = isPaused ? "Continue" : "Pause";
  });
  list.before(pause);
  const look = async () => {
    if (!document.hidden && pause.getAttribute("aria-pressed") !== "true") {
      try {
        const answer = await fetch(list.dataset.tail, { redirect: "error" });
        const fresh = new DOMParser().parseFromString(answer.ok ? await answer.text() : "", "text/html");
        for (const item of [...fresh.querySelectorAll("li[data-key]")].reverse()) {
          if (list.querySelector(`[data-key="${CSS.escape(item.dataset.key)}"]`)) continue;
          item.classList.add("fresh");
          drawTrees(item);
          list.prepend(item);
        }
        while (list.children.length > KEPT_MAX) list.lastElementChild.remove();
      } catch { /* the next request may succeed */ }
    }
    setTimeout(look, TAIL_MS);
  };
  setTimeout(look, TAIL_MS);
}

drawTrees(document);
document.querySelectorAll("[data-tail]").forEach(follow);

// On a telephone the menu is a strip; it begins at the page that is open.
document.querySelector("nav.menu [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
