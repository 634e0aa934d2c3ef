// Runs before the page is drawn, so that it never flashes in the other theme.
"use strict";
(function () {
  var chosen = null;
  try { chosen = localStorage.getItem("theme"); } catch (error) { /* storage is off: follow the system */ }
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
