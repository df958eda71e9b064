// What an operator does with messages: redrive, deliver now, cancel, move and delete them, one or many.

import { ask, field, h, plural } from "./dom.js";

const BATCH = 256; // Ids in one call.

// The states that an action applies to, the verb that it needs, its words, and the call for a batch of ids.
export const ACTIONS = {
  redrive: {
    label: "Redrive",
    verb: "queue:redrive",
    states: ["dead"],
    done: "redriven",
    words: "They are delivered again, with no failures counted.",
    call: async (api, path, ids) => {
      const moved = await api.post(`${path}/redrive`, { ids });
      return { done: moved.count, refused: ids.length - moved.count, reason: "a message with the same unique key exists, or they are gone" };
    },
  },
  cancel: {
    label: "Cancel…",
    verb: "queue:cancel",
    states: ["ready", "delayed", "blocked", "leased"],
    done: "cancelled",
    words: "They are not delivered any more. A consumer that has one of them cannot acknowledge it. This cannot be undone.",
    danger: true,
    call: async (api, path, ids) => tally(await api.post(`${path}/messages/cancel`, { ids })),
  },
  move: {
    label: "Move…",
    verb: "queue:move",
    states: ["ready", "delayed", "blocked", "dead"],
    done: "moved",
    words: "They keep their ids, payloads and failed attempts. Dead letters are delivered again.",
    call: async (api, path, ids, to) => tally(await api.post(`${path}/messages/move`, { ids, to })),
  },
  delete: {
    label: "Delete…",
    verb: "queue:delete_messages",
    states: ["ready", "delayed", "blocked", "dead"],
    done: "deleted",
    words: "Nothing of them is kept. This cannot be undone.",
    danger: true,
    call: async (api, path, ids) => tally(await api.post(`${path}/messages/delete`, { ids })),
  },
};

function tally({ outcomes }) {
  const refused = outcomes.filter((each) => each.code);
  return { done: outcomes.length - refused.length, refused: refused.length, reason: refused[0]?.detail };
}

// Asks before an action. The answer: null, or `{to}` with the target of a move.
export async function question(name, queue, number, some = null) {
  const action = ACTIONS[name];
  const verb = name[0].toUpperCase() + name.slice(1);
  const target = name === "move" ? h("input", { required: true, pattern: "[A-Za-z0-9._@:+=\\-]{1,255}", title: "Letters, digits and . _ @ : + = -", autocomplete: "off", spellcheck: "false" }) : null;
  const counted = some ?? plural(number, "message");
  const yes = name === "cancel" ? `Cancel ${number === 1 ? "the message" : counted}` : `${verb} ${number === 1 ? "the message" : counted}`;
  const words = number === 1 ? action.words.replace("They are", "It is").replace("They keep their ids", "It keeps its id").replace("Nothing of them", "Nothing of it").replace("one of them", "it").replace("Dead letters are", "A dead letter is") : action.words;
  const content = target ? [field("To the queue", target)] : [];
  const isConfirmed = await ask({ title: `${verb} ${counted} of ${queue}?`, words, yes, no: number === 1 ? "Keep it" : "Keep them", content, danger: Boolean(action.danger) });
  return isConfirmed ? { to: target?.value ?? null } : null;
}

// Applies an action to ids, a batch in each call. The answer: how many were done and refused, and why.
export async function apply(name, api, path, ids, to = null) {
  const all = { done: 0, refused: 0, reason: null };
  for (let start = 0; start < ids.length; start += BATCH) {
    const some = await ACTIONS[name].call(api, path, ids.slice(start, start + BATCH), to);
    all.done += some.done;
    all.refused += some.refused;
    all.reason ??= some.refused ? some.reason : null;
  }
  return all;
}

// What was done, in words. An action that was refused for every message is an error.
export function summary(name, { done, refused, reason }) {
  const words = `${plural(done, "message")} ${ACTIONS[name].done}`;
  if (!refused) return words;
  const refusal = `${plural(refused, "message")} not ${ACTIONS[name].done}: ${reason}`;
  if (!done) throw new Error(refusal);
  return `${words}; ${refusal}`;
}

// Asks with a form until the action succeeds or is given up: what was entered is kept after a refusal.
export async function askUntilDone({ act }, form, work, words) {
  let failure = null;
  do {
    const problem = failure && h("p", { class: "problem", role: "alert", text: failure });
    if (!(await ask({ ...form, content: problem ? [...form.content, problem] : form.content, danger: false }))) return;
    failure = null;
    const attempt = async () => {
      try {
        return await work();
      } catch (error) {
        failure = error.message;
        throw error;
      }
    };
    await act(attempt, words);
  } while (failure);
}
