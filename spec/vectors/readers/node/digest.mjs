// The state digest of a row, written from section 5.1 of trace.md.

import { createHash } from 'node:crypto'

// a column's items, none where it is null or each is the default of its index
const unlessDefault = (items, defaultOf) => (items ?? []).every((item, i) => item === defaultOf(i)) ? [] : items

/** The canonical bytes of a row in canonical form (see read.mjs), as one Buffer. */
export function canonicalBytes(row) {
  const p = row.prompt_ids.length
  const o = row.output_ids.length
  const n = row.output_slots ? p : p + o
  const arrays = [
    row.prompt_ids,
    row.output_ids,
    unlessDefault(row.position_ids, i => i),
    unlessDefault(row.visible_from, k => k),
    unlessDefault(row.visible_until, () => n),
    row.output_slots ?? [],
  ]
  const media = row.media ?? []
  return Buffer.concat([
    Buffer.from('memopd-trace/state/1', 'ascii'),
    ...arrays.flatMap(a => [uint64(a.length), ...a.map(int32)]),
    uint64(media.length),
    ...media.flatMap(m => [int32(m.start), int32(m.stop), Buffer.from(m.sha256, 'hex')]),
  ])
}

export const stateDigest = row => createHash('sha256').update(canonicalBytes(row)).digest('hex')

function uint64(value) {
  const bytes = Buffer.alloc(8)
  bytes.writeBigUInt64LE(BigInt(value))
  return bytes
}

function int32(value) {
  const bytes = Buffer.alloc(4)
  bytes.writeInt32LE(value)
  return bytes
}
