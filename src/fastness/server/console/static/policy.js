// The policy of a queue: as facts, and a form that changes it.

import { count, facts, field, h, rate, seconds } from "./dom.js";
import { askUntilDone } from "./message_actions.js";

// Name, words, the least value, and whether it may be left out.
const FIELDS = [
  ["visibility_seconds", "Visibility timeout (seconds)", 0.001],
  ["max_attempts", "Maximum attempts", 1],
  ["delay_seconds", "Delay of new messages (seconds)", 0],
  ["retry_delay_seconds", "First back-off (seconds)", 0],
  ["retry_factor", "Growth of the back-off", 1],
  ["retry_delay_max_seconds", "Longest back-off (seconds)", 0],
  ["retry_jitter", "Jitter of the back-off, 0 to 1", 0],
  ["failures_kept", "Failures kept of a message", 0],
  ["dead_letter_retention_seconds", "Dead letters are kept for (seconds)", 0.001],
  ["retention_seconds", "Messages are kept for (seconds)", 0.001, "no limit"],
  ["result_ttl_seconds", "Results are kept for (seconds)", 0.001],
  ["rate_per_second", "Deliveries per second", 0.001, "no limit"],
  ["rate_per_key", "Deliveries per second of a key", 0.001, "no limit"],
  ["burst_per_key", "Burst of a key", 1, "automatic"],
  ["concurrency_per_key", "Leases of a key at a time", 1, "no limit"],
  ["history_seconds", "History is kept for (seconds)", 0.001],
];
const RULES = [["failures", "failed attempts"], ["deliveries", "deliveries"], ["never", "only a reject"]];
const WHOLE = ["max_attempts", "failures_kept", "burst_per_key", "concurrency_per_key"];

export function policyFacts(rules, queue) {
  return facts([
    ["Visibility timeout", seconds(rules.visibility_seconds)],
    ["Maximum attempts", count(rules.max_attempts)],
    ["Dead letters are made by", RULES.find(([rule]) => rule === rules.dead_letter_rule)[1]],
    ["Delay of new messages", rules.delay_seconds ? seconds(rules.delay_seconds) : "none"],
    ["Back-off after failures", backOff(rules)],
    ["Failures kept of a message", count(rules.failures_kept)],
    ["Dead-letter queue", rules.dead_letter_queue ?? `${queue}.dlq`],
    ["Dead letters are kept for", seconds(rules.dead_letter_retention_seconds)],
    ["Messages are kept for", rules.retention_seconds ? `${seconds(rules.retention_seconds)}${rules.retention_by_age ? ", by age" : ""}` : "no limit"],
    ["Deliveries per second", rules.rate_per_second ? rate(rules.rate_per_second) : "no limit"],
    ["Rate of a key", rules.rate_per_key ? `${rate(rules.rate_per_key)} per second` : "no limit"],
    ["Leases of a key at a time", rules.concurrency_per_key ? count(rules.concurrency_per_key) : "no limit"],
    ["Keys take turns", rules.fair ? "yes" : "no"],
    ["Several messages of a group at a time", rules.group_batches ? "yes" : "no"],
    ["Results are kept for", seconds(rules.result_ttl_seconds)],
    ["History", rules.history === "durable" ? `durable, for ${seconds(rules.history_seconds)}` : "none"],
  ]);
}

export async function editPolicy(context, queue) {
  const { api, act } = context;
  const path = `v1/queues/${encodeURIComponent(queue)}/policy`;
  let rules = null;
  await act(async () => {
    rules = await api.get(path);
  });
  if (!rules) return;
  const inputs = Object.fromEntries(FIELDS.map(([name, , least, none]) => [name, h("input", { type: "number", min: String(least), step: WHOLE.includes(name) ? "1" : "any", required: !none, placeholder: none ?? null, value: rules[name] === null ? "" : String(rules[name]) })]));
  const letters = h("input", { value: rules.dead_letter_queue ?? "", placeholder: `${queue}.dlq`, autocomplete: "off", spellcheck: "false" });
  const history = h("select", {}, ["none", "durable"].map((each) => h("option", { value: each, text: each })));
  history.value = rules.history;
  const rule = h("select", {}, RULES.map(([value, text]) => h("option", { value, text })));
  rule.value = rules.dead_letter_rule;
  const fair = h("input", { type: "checkbox", checked: rules.fair });
  const byAge = h("input", { type: "checkbox", checked: rules.retention_by_age });
  const batches = h("input", { type: "checkbox", checked: rules.group_batches });
  const content = [
    h("div", { class: "columns" }, FIELDS.map(([name, words]) => field(words, inputs[name])), field("Dead-letter queue", letters), field("Dead letters are made by", rule), field("History", history)),
    h("label", { class: "check" }, fair, "Keys take turns"),
    h("label", { class: "check" }, byAge, "Keep stored messages by age"),
    h("label", { class: "check" }, batches, "Deliver several messages of a group at a time"),
  ];
  const changed = () => ({
    ...rules,
    ...Object.fromEntries(FIELDS.map(([name]) => [name, inputs[name].value === "" ? null : Number(inputs[name].value)])),
    dead_letter_queue: letters.value || null,
    history: history.value,
    dead_letter_rule: rule.value,
    fair: fair.checked,
    retention_by_age: byAge.checked,
    group_batches: batches.checked,
  });
  const words = "It applies to messages that are put or delivered from now on.";
  await askUntilDone(context, { title: `Policy of ${queue}`, words, yes: "Set the policy", content }, () => api.put(path, changed()), () => `The policy of ${queue} is set`);
}

function backOff(rules) {
  const grows = rules.retry_factor > 1 && rules.retry_delay_max_seconds > rules.retry_delay_seconds;
  const most = seconds(rules.retry_delay_max_seconds);
  return grows ? `${seconds(rules.retry_delay_seconds)}, × ${rules.retry_factor}, up to ${most}` : seconds(Math.min(rules.retry_delay_seconds, rules.retry_delay_max_seconds));
}
