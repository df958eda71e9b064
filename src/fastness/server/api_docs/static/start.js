// Shows the server's OpenAPI document with Swagger UI. All requests go to this server.
"use strict";

const root = document.documentElement;
root.classList.toggle("dark-mode", root.dataset.theme === "dark");

// Swagger UI writes "object" for every schema that is an object. This writes its name; a click opens the schema.
function nameOf(schema, depth = 0) {
  if (schema === null || typeof schema !== "object" || depth > 8) return null;
  if (schema.title) return schema.title;
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) {
    const names = choices.map((each) => nameOf(each, depth + 1) ?? each.type ?? "any");
    return choices.some((each) => nameOf(each, depth + 1)) ? [...new Set(names)].join(" | ") : null;
  }
  const item = schema.type === "array" && schema.items ? nameOf(schema.items, depth + 1) : null;
  return item && `array<${item}>`;
}

const SchemaNames = ({ React }) => ({
  wrapComponents: {
    JSONSchema202012KeywordType: (Type) => (props) => {
      const name = nameOf(props.schema);
      const style = "json-schema-2020-12__attribute json-schema-2020-12__attribute--primary schema-name";
      return name ? React.createElement("strong", { className: style }, name) : React.createElement(Type, props);
    },
  },
});

async function start() {
  const answer = await fetch("openapi.json");
  if (!answer.ok) throw new Error(`The server answered ${answer.status} for openapi.json.`);
  const spec = await answer.json();
  // Calls go to the address of this page, also behind a proxy that adds a path.
  spec.servers = [{ url: new URL(".", location.href).href.replace(/\/$/, "") }];
  SwaggerUIBundle({
    spec,
    dom_id: "#api",
    layout: "BaseLayout",
    plugins: [SchemaNames],
    deepLinking: true,
    docExpansion: "none",
    defaultModelsExpandDepth: 0,
    displayRequestDuration: true,
    filter: true,
    persistAuthorization: false,
    validatorUrl: null,
  });
}

start().catch((error) => {
  const note = document.createElement("p");
  note.id = "failed";
  note.textContent = `The API page cannot be shown: ${error.message} Reload it to try again.`;
  document.getElementById("api").replaceChildren(note);
});
