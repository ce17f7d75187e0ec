// Store messages and handle them as they come, with Node's fetch alone (18 or newer); it works in a browser, too.
// GATEWAY, for instance http://127.0.0.1:8070, TOKEN and COUNT are set.
import { randomUUID } from "node:crypto";

const { GATEWAY, TOKEN, COUNT } = process.env;
const SUBJECT = `${GATEWAY}/v1/subjects/order.shipped`;
const GROUP = `${SUBJECT}/groups/mail`;
const HEADERS = { Authorization: `Bearer ${TOKEN}`, "Content-Type": "application/json" };

// Repeat a request until it is done or refused for good. With the same key, a message is stored once.
async function post(address, body, headers = {}) {
  for (let wait = 100; ; wait = Math.min(2 * wait, 5000)) {
    let answer;
    try {
      answer = await fetch(address, { method: "POST", headers: { ...HEADERS, ...headers }, body: JSON.stringify(body) });
    } catch (error) {
      console.error(`no answer, again in ${wait} ms: ${error.message}`);
    }
    if (answer?.ok) return answer.json();
    if (answer && answer.status < 500 && answer.status !== 429) throw new Error(await answer.text());
    await new Promise((resume) => setTimeout(resume, wait));
  }
}

// Yield the messages of a stream: EventSource cannot send a token, fetch can.
async function* messages(address) {
  const answer = await fetch(address, { headers: HEADERS });
  if (!answer.ok) throw new Error(await answer.text());
  let text = "";
  for await (const chunk of answer.body.pipeThrough(new TextDecoderStream())) {
    text += chunk;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
      if (lines.includes("event: error")) throw new Error(data);
      if (data) yield JSON.parse(data);
    }
  }
}

for (let number = 0; number < COUNT; number++) {
  const sent = await post(`${SUBJECT}/messages`, { properties: { number } }, { "Idempotency-Key": randomUUID() });
  console.log(sent.outcome, sent.id);
}

let handled = 0;
for await (const message of messages(`${GROUP}/stream?start=earliest&client=node&unacked_max=10`)) {
  console.log("handled", message.properties.number, "attempt", message.attempt);
  await post(`${GROUP}/ack?client=node`, { handles: [message.handle] });
  if (++handled === Number(COUNT)) process.exit(0);
}
