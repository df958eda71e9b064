// The sign-in page.

import { h } from "./dom.js";

export function login(problem, onToken) {
  const field = h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "token-help token-problem" });
  const wrong = h("p", { id: "token-problem", class: "problem", role: "alert", hidden: !problem, text: problem ? `Sign-in failed. ${problem.message}` : "" });
  const enter = h("button", { type: "submit", class: "primary", text: "Sign in" });
  const form = h(
    "form",
    {
      onsubmit: async (event) => {
        event.preventDefault();
        enter.disabled = field.disabled = wrong.hidden = true; // The response replaces the form.
        await onToken(field.value.trim());
      },
    },
    h("label", { for: "token", text: "Token" }),
    field,
    h("p", { id: "token-help", class: "dim", text: "Kept in this tab until it is closed, and sent to this server only. Create a token with `fastness token create`." }),
    wrong,
    enter,
  );
  queueMicrotask(() => field.focus());
  return h("main", { class: "alone" }, h("section", { class: "card" }, h("img", { src: "console/icon.svg", alt: "", width: "36", height: "36" }), h("h1", { text: "Fastness" }), form));
}
