// Light or dark as the system says, or as chosen here; set before the first paint, so that nothing flashes.

const STORED = "shoal-theme";

function storedTheme() {
  try {
    return localStorage.getItem(STORED) ?? "auto";
  } catch {
    return "auto"; // storage is turned off: then nothing is remembered
  }
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(STORED, theme);
  } catch {
    // as above
  }
  dispatchEvent(new Event("themechange"));
}

setTheme(storedTheme());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
