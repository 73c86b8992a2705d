// Run this reader over the vectors:  node check.mjs [VECTORS_FOLDER]
//
// Prints one line of JSON a vector: {"file", "verdict": "agrees" | "refused", "rows", "code"}, and for a disagreement
// {"file", "verdict": "differs", "detail"}; the total on stderr; exit code 1 if there is one. Vectors that a reader can read and only a
// validator finds fault with, or that are about faulty views or about scores, are not run: this is a reader.

import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { isDeepStrictEqual } from 'node:util'
import { oneLine, Refusal, readTrace, readViews } from './read.mjs'

const REFUSALS = ['E-NO-INPUT', 'E-UNREADABLE', 'E-INCOMPLETE', 'E-META-MISSING', 'E-META-INVALID', 'E-VERSION-MAJOR', 'E-FEATURE-UNKNOWN']
if (process.argv.length > 3) {
  console.error('usage: node check.mjs [VECTORS_FOLDER]')
  process.exit(2)
}
const VECTORS = process.argv[2] ?? fileURLToPath(new URL('../../', import.meta.url))
const load = name => JSON.parse(readFileSync(join(VECTORS, name), 'utf8'))

async function judge(entry) {
  const expected = entry.expected && load(entry.expected)
  let read
  try {
    read = await readTrace(join(VECTORS, entry.file))
    if (expected?.views) Object.assign(read, await readViews(join(VECTORS, entry.inputs.views), read.rows))
  } catch (error) {
    if (!(error instanceof Refusal)) return expected ? oneLine(error) : refusal(entry, 'E-UNREADABLE', error.message)
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

function manifest() {
  try {
    return load('manifest.json')
  } catch (error) {
    console.error(`error: ${VECTORS}: no manifest of vectors: ${oneLine(error)}`)
    process.exit(2)
  }
}

const total = { agrees: 0, refused: 0, differs: 0, left: 0 }
for (const entry of manifest().vectors) {
  const aboutInputs = Object.keys(entry.inputs).length > 0
  if (!entry.expected && (aboutInputs || !REFUSALS.includes(entry.codes[0]))) {
    total.left++
    continue
  }
  const found = await judge(entry)
  const result = typeof found === 'string' ? { verdict: 'differs', detail: found } : found
  total[result.verdict]++
  console.log(JSON.stringify({ file: entry.file, ...result }))
}
console.error(`${total.agrees} agree, ${total.refused} refused as expected, ${total.differs} differ; ${total.left} are for validators`)
process.exitCode = total.differs ? 1 : 0
