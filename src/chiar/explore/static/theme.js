"use strict";
// Sets the theme before the first paint: the user's last choice, else what the system prefers.
(() => {
  const root = document.documentElement;
  const stored = () => { try { return localStorage.getItem("chiar-theme"); } catch { return null; } };
  const wanted = () => stored() || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

  function apply(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = theme === "dark" ? "Light theme" : "Dark theme";
  }

  apply(wanted());
  document.addEventListener("DOMContentLoaded", () => {
    apply(root.dataset.theme);
    document.getElementById("theme")?.addEventListener("click", () => {
      const next = root.dataset.theme === "dark" ? "light" : "dark";
      try { localStorage.setItem("chiar-theme", next); } catch { /* a page opened from a file may have no storage */ }
      apply(next);
    });
  });
})();
