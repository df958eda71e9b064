// Before anything is drawn: the colours that were chosen last time, or those of the system.
"use strict";
{
  const chosen = localStorage.getItem("holdfast-theme");
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen ?? (dark ? "dark" : "light");
}
