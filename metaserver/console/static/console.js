"use strict";
// Renews each part of the page that says where its newer self is, every 5 seconds, while somebody can see it.
for (const part of document.querySelectorAll("[data-renew]")) {
  const pause = document.createElement("button");
  pause.type = "button";
  pause.className = "quiet";
  pause.textContent = "Pause";
  pause.setAttribute("aria-pressed", "false");
  pause.addEventListener("click", () =>
    pause.setAttribute("aria-pressed", pause.getAttribute("aria-pressed") !== "true"));
  part.after(pause);
  setInterval(async () => {
    if (document.hidden || pause.getAttribute("aria-pressed") === "true") return;
    try {
      const answer = await fetch(part.dataset.renew, { redirect: "error" });
      if (answer.ok) part.innerHTML = await answer.text(); // escaped where it is written, as the page is
    } catch { /* the next one may come */ }
  }, 5000);
}
