// The form that puts a message into a queue.

import { field, h } from "./dom.js";
import { askUntilDone } from "./message_actions.js";

const PAYLOAD_BYTES_MAX = 16_384; // As CONSOLE_PUBLISH_BYTES_MAX of limits.py.
const TYPES = ["application/json", "text/plain"];

export async function publish(context, queue) {
  const body = h("textarea", { rows: "6", spellcheck: "false", class: "mono", oninput: () => check() });
  const kind = h("select", { onchange: () => check() }, TYPES.map((each) => h("option", { value: each, text: each })));
  const key = h("input", { maxlength: "256", autocomplete: "off", spellcheck: "false" });
  const group = h("input", { pattern: "[A-Za-z0-9._@:+=\\-]{1,255}", title: "Letters, digits and . _ @ : + = -", autocomplete: "off", spellcheck: "false" });
  const priority = h("input", { type: "number", min: "0", max: "9", step: "1", value: "5", required: true });
  const delay = h("input", { type: "number", min: "0", max: "31536000", step: "any", value: "0", required: true });
  const attributes = h("textarea", { rows: "2", spellcheck: "false", class: "mono", oninput: () => check() });

  function check() {
    body.setCustomValidity(problemOf(body.value, kind.value));
    attributes.setCustomValidity(attributesOf(attributes.value) === null ? "Write one attribute in each line: name=value" : "");
  }

  check();
  const content = [
    field("Payload", body, "At most 16 KiB. Put larger payloads with the command line."),
    field("Content type", kind),
    h("div", { class: "columns" }, field("Key", key, "Optional."), field("Group", group, "Optional.")),
    h("div", { class: "columns" }, field("Priority", priority, "9 is delivered first."), field("Delay in seconds", delay)),
    field("Attributes", attributes, "Optional; one in each line: name=value"),
  ];
  const message = () => ({
    queue,
    payload_base64: base64(new TextEncoder().encode(body.value)),
    payload_content_type: kind.value,
    key: key.value || null,
    group: group.value || null,
    priority: Number(priority.value),
    delay_seconds: Number(delay.value),
    attributes: attributesOf(attributes.value),
  });
  await askUntilDone(context, { title: `Publish a message to ${queue}`, yes: "Publish", content }, () => context.api.post("v1/queue/enqueue", message()), (receipt) => `Published ${receipt.message_id}`);
}

function problemOf(words, kind) {
  const size = new TextEncoder().encode(words).length;
  if (size > PAYLOAD_BYTES_MAX) return `The payload has ${size} bytes; the console takes ${PAYLOAD_BYTES_MAX}. Use fastness queue put.`;
  if (!kind.includes("json")) return "";
  try {
    JSON.parse(words);
    return "";
  } catch (error) {
    return `This is not valid JSON: ${error.message}`;
  }
}

// The attributes in lines of name=value; null if a line is something else.
function attributesOf(words) {
  const lines = words.split("\n").filter((line) => line.trim());
  const pairs = lines.map((line) => line.split(/=(.*)/s).map((part) => part.trim()));
  return pairs.every((pair) => pair.length > 1 && pair[0]) ? Object.fromEntries(pairs.map(([name, value]) => [name, value])) : null;
}

export function base64(bytes) {
  return btoa(Array.from(bytes, (each) => String.fromCharCode(each)).join(""));
}
