// Before the first paint, so that a page doesn't flash in the other theme.
try {
  const theme = localStorage.getItem("saccade-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is disabled: the system's theme applies */ }
