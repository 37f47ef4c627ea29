// Runs before the first paint, so that a chosen theme does not flash. Not a module for that reason.
"use strict";
try {
  const theme = localStorage.getItem("jaxpaged-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; the system's theme is right then.
}
