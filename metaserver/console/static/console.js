"use strict";
// Every page works without this script. It renews parts of a page, labels the cells of narrow tables, and draws JSON as a tree.

const RENEW_MS = 5000;

// On a telephone a row becomes a card; each cell then shows the heading of its column.
function label(root) {
  for (const table of root.querySelectorAll("table")) {
    const names = [...table.querySelectorAll("thead th")].map(cell => cell.textContent.trim());
    if (!names.length || table.querySelector("[rowspan]")) continue;
    table.classList.add("cards");
    for (const row of table.tBodies[0]?.rows ?? [])
      [...row.cells].forEach((cell, at) => {
        if (cell.tagName !== "TD" || cell.colSpan > 1) return;
        cell.dataset.label = names[at] ?? "";
        cell.classList.toggle("blank", !cell.textContent.trim() && !cell.querySelector("svg, a, input"));
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
