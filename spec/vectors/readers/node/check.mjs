// Run this reader over the vectors:  node check.mjs [VECTORS_FOLDER]
//
// Prints one line of JSON a vector: {"file", "verdict": "agrees" | "refused", "rows", "code"}, and for a disagreement
// {"file", "verdict": "differs", "detail"}; exit code 1 if there is one. Vectors that a reader can read and only a
// validator finds fault with, or that are about faulty views or about scores, are not run: this is a reader.

import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { isDeepStrictEqual } from 'node:util'
import { Refusal, readTrace, readViews } from './read.mjs'

const REFUSALS = ['E-NO-INPUT', 'E-UNREADABLE', 'E-INCOMPLETE', 'E-META-MISSING', 'E-META-INVALID', 'E-VERSION-MAJOR', 'E-FEATURE-UNKNOWN']
const VECTORS = process.argv[2] ?? fileURLToPath(new URL('../../', import.meta.url))
const load = name => JSON.parse(readFileSync(join(VECTORS, name), 'utf8'))

async function judge(entry) {
  const expected = entry.expected && load(entry.expected)
  let read
  try {
    read = await readTrace(join(VECTORS, entry.file))
    if (expected?.views) Object.assign(read, await readViews(join(VECTORS, entry.inputs.views), read.rows))
  } catch (error) {
    if (!(error instanceof Refusal)) return expected ? `${error.stack}` : refusal(entry, 'E-UNREADABLE', error.message)
    return refusal(entry, error.code, error.message)
  }
  if (!expected) return `read, expected a refusal with ${entry.codes}`
  if (expected.rows.length !== entry.rows) return `${expected.rows.length} rows, the manifest says ${entry.rows}`
  for (const part of Object.keys(expected)) {
    if (read[part].length !== expected[part].length) return `${read[part].length} ${part}, expected ${expected[part].length}`
    for (const [i, want] of expected[part].entries()) {
      if (!isDeepStrictEqual(read[part][i], want)) {
        return `${part} ${i}: ${JSON.stringify(read[part][i])}, expected ${JSON.stringify(want)}`
      }
    }
  }
  return { verdict: 'agrees', rows: read.rows.length, ...(expected.views && { views: read.views.length }) }
}

function refusal(entry, code, message) {
  return entry.codes.includes(code) ? { verdict: 'refused', code, message } : `${message}, expected ${entry.codes}`
}

let failed = 0
for (const entry of load('manifest.json').vectors) {
  const aboutInputs = Object.keys(entry.inputs).length > 0
  if (!entry.expected && (aboutInputs || !REFUSALS.includes(entry.codes[0]))) continue
  const result = await judge(entry)
  if (typeof result === 'string') failed++
  console.log(JSON.stringify({ file: entry.file, ...(typeof result === 'string' ? { verdict: 'differs', detail: result } : result) }))
}
process.exitCode = failed ? 1 : 0
