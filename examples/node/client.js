// A client of an Ullage cluster: what any program does with it, in one file.
//
//   node client.js models
//   node client.js place MODEL [CONTEXT_TOKENS]     waits until it runs
//   node client.js state [SEQUENCE]
//   node client.js follow [COUNT]                    events from the first on, one JSON object a line
//   node client.js generate MODEL PROMPT
//   node client.js release INSTANCE
//
// The master is taken from ULLAGE_MASTER, else 127.0.0.1:50500. The protos are read from the checkout.
// JSON here is as the protos name things: 64-bit numbers are strings, and a field that is not there is unknown.

'use strict';

const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const MASTER = process.env.ULLAGE_MASTER || '127.0.0.1:50500';
const PROTOS = path.join(__dirname, '..', '..', 'protos');
const CALL_MS_MAX = 30_000;

const definition = protoLoader.loadSync(
  ['model', 'event', 'placement', 'runner'].map((name) => `ullage/v1/${name}_service.proto`),
  // Defaults show a 0 that is meant, e.g. first_layer. What was not measured stays absent: such fields are optional.
  { includeDirs: [PROTOS], keepCase: true, longs: String, enums: String, defaults: true, oneofs: true },
);
const ullage = grpc.loadPackageDefinition(definition).ullage.v1;

const credentials = grpc.credentials.createInsecure();
const models = new ullage.ModelService(MASTER, credentials);
const events = new ullage.EventService(MASTER, credentials);
const placements = new ullage.PlacementService(MASTER, credentials);

function call(client, method, request) {
  return new Promise((resolve, reject) => {
    const answered = (error, response) => (error ? reject(error) : resolve(response));
    client[method](request, { deadline: Date.now() + CALL_MS_MAX }, answered);
  });
}

function print(message) {
  console.log(JSON.stringify(message));
}

async function listModels() {
  const { models: known } = await call(models, 'ListModels', {});
  known.forEach(({ model_id, model_type, layers }) => print({ model_id, model_type, layers: layers.length }));
}

async function place(modelId, contextTokens) {
  const spec = { model_id: modelId, requested_by: 'examples/node' };
  if (contextTokens !== undefined) spec.context_tokens = contextTokens;
  const { instance } = await call(placements, 'Place', { spec });
  for await (const change of placements.WatchInstance({ instance_id: instance.instance_id })) {
    const { instance_id, state, failure } = change.instance;
    if (state === 'INSTANCE_STATE_FAILED') throw new Error(failure);
    if (state === 'INSTANCE_STATE_RUNNING') {
      print({ instance_id, state, shards: change.instance.placement.shards });
      return;
    }
  }
}

async function state(sequence) {
  print(await call(events, 'GetState', sequence === undefined ? {} : { at_sequence: sequence }));
}

async function follow(count) {
  let left = count === undefined ? Infinity : Number(count);
  const stream = events.Follow({ from_sequence: '1' });
  for await (const { events: batch } of stream) {
    for (const event of batch.slice(0, left)) print(event);
    left -= batch.length;
    if (left <= 0) return;
  }
}

// Prompts go to the runner of the first rank, not to the master.
async function generate(modelId, prompt) {
  const { state: cluster } = await call(events, 'GetState', {});
  const running = (one) => one.spec.model_id === modelId && one.state === 'INSTANCE_STATE_RUNNING';
  const instance = cluster.instances.find(running);
  if (!instance) throw new Error(`no instance of ${modelId} is running: place it first`);
  const first = instance.placement.shards[0].node_id;
  const { address } = cluster.nodes.find((node) => node.identity.node_id === first).runner;

  const runner = new ullage.RunnerService(address, credentials);
  const chat = { messages: [{ role: 'user', content: prompt }] };
  const sampling = { max_tokens: '32' };
  for await (const { text, summary } of runner.Generate({ instance_id: instance.instance_id, chat, sampling })) {
    process.stdout.write(text || '');
    if (summary) process.stdout.write('\n');
  }
}

async function release(instanceId) {
  const { instance } = await call(placements, 'Release', { instance_id: instanceId, requested_by: 'examples/node' });
  print({ instance_id: instance.instance_id, state: instance.state });
}

const commands = { models: listModels, place, state, follow, generate, release };

async function main([name, ...rest]) {
  if (!Object.hasOwn(commands, name || '')) {
    console.error(`usage: node client.js ${Object.keys(commands).join('|')} ...`);
    process.exit(2);
  }
  try {
    await commands[name](...rest);
    // Once all is written: exiting drops what a pipe that is full has not taken yet.
    process.stdout.write('', () => process.exit(0));
  } catch (error) {
    // A refusal's details are its whole text, as `ullage place` prints it.
    console.error(`error: ${error.details || error.message}`);
    process.exit(1);
  }
}

main(process.argv.slice(2));
