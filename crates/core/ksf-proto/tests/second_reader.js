// Reads HTTP/1 with node's own parser (llhttp, strict), for comparison. A line on stdin is `KIND HEX`: `q` requests,
// `r` responses, `h` a response to HEAD. The answer is a line: a word for each message that is complete,
// `METHOD-OR-STATUS:BODY-IN-HEX`, and at last `end` at the end of a message, `part` inside one, `bad CODE` after an error.
'use strict';
process.removeAllListeners('warning');
process.on('warning', () => {});
const { HTTPParser, methods } = process.binding('http_parser');

function read(kind, bytes) {
  const parser = new HTTPParser();
  parser.initialize(kind === 'q' ? HTTPParser.REQUEST : HTTPParser.RESPONSE, {});
  const words = [];
  let first, body, open = false;
  parser[HTTPParser.kOnHeaders] = () => {};
  parser[HTTPParser.kOnHeadersComplete] = (major, minor, headers, method, url, status) => {
    [first, body, open] = [kind === 'q' ? methods[method] : status, [], true];
    return kind === 'h' ? 1 : 0;
  };
  parser[HTTPParser.kOnBody] = (piece) => { body.push(Buffer.from(piece)); };
  parser[HTTPParser.kOnMessageComplete] = () => {
    words.push(`${first}:${Buffer.concat(body).toString('hex')}`);
    open = false;
  };
  let result = parser.execute(bytes);
  if (!(result instanceof Error)) result = parser.finish();
  if (!(result instanceof Error)) return [...words, open ? 'part' : 'end'].join(' ');
  const ended = result.code === 'HPE_INVALID_EOF_STATE';
  return [...words, ended ? 'part' : `bad ${result.code}`].join(' ');
}

let rest = '';
process.stdin.setEncoding('latin1');
process.stdin.on('data', (text) => {
  const lines = (rest + text).split('\n');
  rest = lines.pop();
  for (const line of lines) process.stdout.write(`${read(line[0], Buffer.from(line.slice(2), 'hex'))}\n`);
});
