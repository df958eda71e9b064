// Runs before the page is drawn: applies the saved colour theme, or that of the system.
"use strict";
{
  const chosen = localStorage.getItem("fastness-theme");
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen ?? (dark ? "dark" : "light");
}
