// The theme button, buttons that copy a command, and focus on what is wrong with a form.
"use strict";
(function () {
  var root = document.documentElement;
  var button = document.querySelector("[data-theme-switch]");

  function isDark() {
    if (root.dataset.theme) return root.dataset.theme === "dark";
    return matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function show() { button.setAttribute("aria-pressed", String(isDark())); }

  button.addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch (error) { /* for this page alone, then */ }
    show();
  });
  show();

  if (navigator.clipboard) {
    document.querySelectorAll("[data-copy]").forEach(function (copy) {
      copy.hidden = false;
      copy.addEventListener("click", function () {
        navigator.clipboard.writeText(copy.dataset.copy).then(function () { copy.textContent = "Copied"; });
      });
    });
  }

  var problems = document.getElementById("problems");
  if (problems) problems.focus();
})();
