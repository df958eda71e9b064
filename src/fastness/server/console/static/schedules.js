// The schedules of a queue: messages that are put at the times of a cron expression.

import { Table, ask, brief, button, card, clock, command, emptyState, field, h, payload, rowActions, text } from "./dom.js";
import { askUntilDone } from "./message_actions.js";
import { base64 } from "./publish.js";

export function schedules(context, queue) {
  const { api, act, allows } = context;
  const path = `v1/queues/${encodeURIComponent(queue)}/schedules`;
  const table = new Table(
    "Schedules",
    [
      text("Name", (row) => row.name, { head: true }),
      text("Cron", (row) => row.cron, { class: "mono" }),
      text("Time zone", (row) => row.timezone),
      text("Next", (row) => clock(row.next_ms)),
      text("Payload", (row) => brief(payload(row.message), 60), { class: "mono dim" }),
      ...(allows("queue:schedules.remove") ? [rowActions("Remove", remove)] : []),
    ],
    { key: (row) => row.name, empty: emptyState("This queue has no schedules. A schedule puts a message at the times of a cron expression:", command(api, `queue schedule set ${queue} nightly '0 3 * * *' '{}'`)) },
  );

  function remove(cell, row) {
    const question = { title: `Remove the schedule ${row.name}?`, words: "It puts no more messages. Messages that it has put stay in the queue.", yes: "Remove the schedule", no: "Keep it" };
    const end = async () => (await ask(question)) && act(() => api.delete(`${path}/${encodeURIComponent(row.name)}`), () => `The schedule ${row.name} is removed`);
    cell.append(button("Remove…", end, { class: "small danger", "aria-label": `Remove the schedule ${row.name}` }));
  }

  const add = button("Add…", () => addSchedule(context, queue, path), { class: "small", "aria-label": "Add a schedule", hidden: !allows("queue:schedules.set") });
  const element = card("Schedules", add, table.element);
  element.hidden = !allows("queue:schedules.list");
  return {
    element,
    load: async () => {
      if (!element.hidden) table.show((await api.get(path, { tier: "important" })).schedules);
    },
  };
}

async function addSchedule(context, queue, path) {
  const name = h("input", { required: true, pattern: "[A-Za-z0-9._@:+=\\-]{1,255}", title: "Letters, digits and . _ @ : + = -", autocomplete: "off", spellcheck: "false" });
  const cron = h("input", { required: true, placeholder: "0 3 * * *", autocomplete: "off", spellcheck: "false" });
  const zone = h("input", { required: true, value: "UTC", autocomplete: "off", spellcheck: "false" });
  const body = h("textarea", { rows: "4", spellcheck: "false", class: "mono", oninput: () => check() });
  body.value = "{}";

  function check() {
    try {
      JSON.parse(body.value);
      body.setCustomValidity("");
    } catch (error) {
      body.setCustomValidity(`This is not valid JSON: ${error.message}`);
    }
  }

  const content = [
    field("Name", name, "A schedule with this name is replaced."),
    field("Cron expression", cron, "Minute, hour, day of the month, month, day of the week."),
    field("Time zone", zone, "For example UTC or Europe/Berlin."),
    field("Payload", body, "JSON."),
  ];
  const message = () => ({ payload_base64: base64(new TextEncoder().encode(body.value)), payload_content_type: "application/json" });
  const save = () => context.api.put(`${path}/${encodeURIComponent(name.value)}`, { cron: cron.value, timezone: zone.value, message: message() });
  await askUntilDone(context, { title: `Add a schedule to ${queue}`, yes: "Save the schedule", content }, save, (saved) => `The schedule ${saved.name} puts its next message at ${clock(saved.next_ms)}`);
}
