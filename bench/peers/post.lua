-- For wrk: the requests of PASTE's phttpd, of as many bytes as its first argument says, head included.
-- The body begins with a key of 8 bytes; the keys are written in turn. At the end there is a line of JSON.

local KEYS = 1000
local KEY_BYTES = 8
-- A body of so many bytes, and one of up to ten times as many, have as long a Content-Length.
local LIKE_BYTES = 1000

local requests = {}
local turn = 0

function init(args)
   local head_bytes = #wrk.format("POST", "/", nil, string.rep("v", LIKE_BYTES)) - LIKE_BYTES
   local body_bytes = tonumber(args[1]) - head_bytes
   assert(body_bytes >= LIKE_BYTES and body_bytes < 10 * LIKE_BYTES, "no length for a request")
   for number = 1, KEYS do
      local key = string.format("k%07d", number)
      requests[number] = wrk.format("POST", "/", nil, key .. string.rep("v", body_bytes - KEY_BYTES))
   end
end

function request()
   turn = turn % KEYS + 1
   return requests[turn]
end

function done(summary, latency)
   local errors = summary.errors
   local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
   io.write(string.format(
      '{"requests":%d,"failed":%d,"received_bytes":%d,"duration_us":%d,' ..
      '"p50_us":%d,"p99_us":%d,"p999_us":%d,"max_us":%d}\n',
      summary.requests, failed, summary.bytes, summary.duration,
      latency:percentile(50), latency:percentile(99), latency:percentile(99.9), latency.max
   ))
end
