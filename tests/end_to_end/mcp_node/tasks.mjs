// The TypeScript client of MCP against a server of Fastness:
//
//   node tasks.mjs URL TOKEN legacy|modern start            calls the tool as a task, prints its reference, and leaves
//   node tasks.mjs URL TOKEN legacy|modern finish REFERENCE  finds the task again, answers its question, prints the result
//   node tasks.mjs URL TOKEN legacy|modern status TASK_ID    prints the status of a task, or the error of asking for it
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import {
  createTaskSessionFromClient,
  resultFromTaskOutcome,
  toolDeclarationFromMcpTool,
} from "@modelcontextprotocol/ext-tasks/client";
import * as v2 from "@modelcontextprotocol/ext-tasks/core/v2";

const [url, token, era, verb, argument] = process.argv.slice(2);
const clientInfo = { name: "fastness-test", version: "1" };
const clientCapabilities = { elicitation: { form: {} } };
const headers = { Authorization: `Bearer ${token}` };
const isModern = era === "modern";
const seen = [];
const anything = { "~standard": { version: 1, vendor: "fastness-test", validate: (value) => ({ value }) } };

// The TypeScript client sends no requests of the extension: its host program does, with this function.
async function rawDispatch(request) {
  const response = await fetch(url, {
    method: "POST",
    headers: {
      ...headers,
      Accept: "application/json, text/event-stream",
      "Content-Type": "application/json",
      "Mcp-Protocol-Version": "2026-07-28",
      "Mcp-Method": request.method,
      "Mcp-Name": request.params.taskId ?? request.params.name,
    },
    body: JSON.stringify({ jsonrpc: "2.0", id: seen.length + 1, ...request }),
  });
  const text = await response.text();
  const line = text.startsWith("{") ? text : text.split("\n").find((each) => each.startsWith("data: {")).slice(6);
  const { result, error } = JSON.parse(line);
  if (error !== undefined) return { kind: "error", error };
  if (request.method === "tools/call") seen.push(["created", v2.isCreateTaskResultV2(result)]);
  if (request.method === "tasks/get") seen.push([result.status, v2.isDetailedTaskV2(result)]);
  return { kind: "result", result };
}

const client = new Client(clientInfo, {
  capabilities: clientCapabilities,
  ...(isModern ? { versionNegotiation: { mode: "auto" } } : {}),
});
await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } }));
const session = createTaskSessionFromClient(client, {
  endpointId: "fastness",
  onInputRequest: async (request) => {
    seen.push(["asked", request.params.message]);
    return { action: "accept", content: { size: 9 } };
  },
  ...(isModern
    ? { rawDispatch, v2RequestFraming: { protocolVersion: "2026-07-28", clientInfo, clientCapabilities } }
    : {}),
});
const print = (value) => console.log(JSON.stringify({ era: client.getProtocolEra(), seen, ...value }));
if (verb === "start") {
  const tools = (await client.listTools()).tools;
  const declaration = toolDeclarationFromMcpTool(tools.find((tool) => tool.name === "resize"));
  const execution = await session.callTool("resize", { width: 3 }, { declaration, task: { preference: "prefer" } });
  const reference = execution.serializeReference();
  print({ tools: tools.length, kind: execution.kind, taskId: execution.handle.taskId, reference });
  process.exit(0); // It is gone, without a word: closing the session would cancel its tasks.
} else if (verb === "finish") {
  const execution = await session.resumeTask(JSON.parse(argument));
  let asked;
  const onEvent = (event) => {
    // In 2025-11-25 the questions come while the result is waited for. The package waits for the end before that.
    if (!isModern && event.task?.status === "input_required") {
      asked ??= client.request({ method: "tasks/result", params: { taskId: event.task.taskId } }, anything);
    }
  };
  const { outcome } = await execution.settle({ onEvent });
  await asked;
  print({ result: resultFromTaskOutcome(outcome) });
} else {
  try {
    print({ status: (await session.task(argument).snapshot()).status });
  } catch (error) {
    print({ error: error.message });
  }
}
await session.close();
await client.close();
