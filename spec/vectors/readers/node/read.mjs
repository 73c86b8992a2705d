// A reader of traces and views, written from the specification's texts and schema/*.json alone.
//
//     node read.mjs TRACE      prints the rows and their state digests as canonical JSON; exit code 3 and one line if not
//
// It reads Parquet files, Arrow IPC files and folders; it refuses what the specification says a reader refuses (a
// `Refusal` with a code) and ignores what it does not know. It does not validate.

import { existsSync, readFileSync, statSync } from 'node:fs'
import { basename, join } from 'node:path'
import { fileURLToPath, pathToFileURL } from 'node:url'
import { CompressionType, setCompressionCodec, tableFromIPC } from '@uwdata/flechette'
import Ajv from 'ajv/dist/2020.js'
import { parquetMetadata, parquetReadObjects } from 'hyparquet'
import { compressors } from 'hyparquet-compressors'
import { stateDigest } from './digest.mjs'

const SPEC = fileURLToPath(new URL('../../../', import.meta.url))
const load = name => JSON.parse(readFileSync(join(SPEC, name), 'utf8'))
const KNOWN = load('schema/trace.json').spec_version
const TRACE = table('memopd_trace', 'schema/trace.json', 'metadata.schema.json')
const VIEWS = table('memopd_trace_views', 'schema/views.json', 'views-metadata.schema.json')
const FEATURES = ['visibility', 'output_slots', 'media', 'routed_experts']

setCompressionCodec(CompressionType.ZSTD, { decode: bytes => compressors.ZSTD(bytes, 0).slice() })

function table(key, schema, metadata) {
  const { columns } = load(schema)
  return {
    key,
    types: Object.fromEntries(columns.map(c => [c.name, parseType(c.type)])),
    required: columns.filter(c => c.required).map(c => c.name),
    hasDeclaredForm: new Ajv().compile(load(metadata)),
  }
}

/** An input that a reader does not read; `code` says why. */
export class Refusal extends Error {
  constructor(code, message) {
    super(`${code}: ${message}`)
    this.code = code
  }
}

/** What an error of a library says, without its stack. */
export const oneLine = error => `${error.name}: ${error.message}`.replace(/\s+/g, ' ')

/** All rows of a trace in canonical form, with their digests and the metadata of the first file. */
export async function readTrace(path) {
  if (!existsSync(path)) throw new Refusal('E-NO-INPUT', path)
  const rows = []
  let metadata
  for (const file of statSync(path).isDirectory() ? parts(path) : [path]) {
    const part = await readFile(file, TRACE)
    metadata ??= part.metadata
    for (const row of part.rows) rows.push(row)
  }
  return { metadata, rows, state_digests: rows.map(stateDigest) }
}

/** All rows of a views file, and the digest of each viewed state; `rows` are those of the trace. */
export async function readViews(path, rows) {
  const { metadata, rows: views } = await readFile(path, VIEWS)
  const key = row => JSON.stringify([row.episode_id, row.invocation_index])
  const outputs = new Map(rows.map(row => [key(row), row.output_ids]))
  return { metadata, views, view_digests: views.map(view => stateDigest({ ...view, output_ids: outputs.get(key(view)) })) }
}

async function readFile(path, table) {
  if (!existsSync(path)) throw new Refusal('E-NO-INPUT', path)
  const { raw, read } = open(path, table.key)
  const metadata = checkMetadata(raw, table)
  return { metadata, rows: (await read()).map(row => canonicalRow(row, table)) }
}

function parts(folder) {
  let manifest
  try {
    manifest = JSON.parse(readFileSync(join(folder, 'manifest.json'), 'utf8'))
  } catch (error) {
    throw new Refusal('E-INCOMPLETE', error.message)
  }
  const names = manifest.files?.map(part => part.name)
  if (manifest.complete !== true || !names?.length || names.some(name => basename(name) !== name)) {
    throw new Refusal('E-INCOMPLETE', 'not a complete list of parts')
  }
  return names.map(name => {
    if (!existsSync(join(folder, name))) throw new Refusal('E-INCOMPLETE', `no ${name}`)
    return join(folder, name)
  })
}

/** The text under the key, and a function that reads the rows. What a file is, its first bytes tell. */
function open(path, key) {
  const bytes = readFileSync(path)
  const data = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length)
  const magic = bytes.subarray(0, 6).toString('latin1')
  try {
    if (magic.startsWith('PAR1')) return openParquet(data, key)
    if (magic === 'ARROW1') return openIpc(data, key)
  } catch (error) {
    throw new Refusal('E-UNREADABLE', error.message)
  }
  throw new Refusal('E-UNREADABLE', 'neither Parquet nor Arrow IPC')
}

function openParquet(file, key) {
  const parsers = { timestampFromMilliseconds: t => t * 1000n, timestampFromMicroseconds: t => t, timestampFromNanoseconds: t => t / 1000n }
  const metadata = parquetMetadata(file)
  const raw = metadata.key_value_metadata?.find(pair => pair.key === key)?.value
  return { raw, read: () => parquetReadObjects({ file, metadata, compressors, parsers, utf8: false }) }
}

function openIpc(file, key) {
  const table = tableFromIPC(new Uint8Array(file), { useBigInt: true })
  return { raw: table.schema.metadata?.get(key), read: () => table.toArray() }
}

function checkMetadata(raw, { key, hasDeclaredForm }) {
  if (raw === undefined) throw new Refusal('E-META-MISSING', `no key ${key}`)
  let metadata
  try {
    metadata = JSON.parse(raw)
  } catch (error) {
    throw new Refusal('E-META-INVALID', error.message)
  }
  if (!hasDeclaredForm(metadata)) {
    const [fault] = hasDeclaredForm.errors
    throw new Refusal('E-META-INVALID', `${fault.instancePath || 'document'} ${fault.message}`)
  }
  const version = metadata.spec_version ?? KNOWN
  if (version.split('.')[0] !== KNOWN.split('.')[0]) {
    throw new Refusal('E-VERSION-MAJOR', `the file has ${version}, this reader knows ${KNOWN}`)
  }
  for (const feature of metadata.required_features ?? []) {
    if (!FEATURES.includes(feature)) throw new Refusal('E-FEATURE-UNKNOWN', `the file requires '${feature}'`)
  }
  return metadata
}

/** The declared cells that are not null; whatever else the row holds is ignored. */
function canonicalRow(row, { types, required }) {
  const out = {}
  for (const [name, type] of Object.entries(types)) {
    const value = row[name] ?? null
    if (value === null && required.includes(name)) throw new Refusal('E-SCHEMA', `'${name}' is null or missing`)
    if (value !== null) out[name] = canonical(value, type, name)
  }
  return out
}

function canonical(value, type, name) {
  if (value === null || value === undefined) return null
  const must = ok => {
    if (!ok) throw new Refusal('E-SCHEMA', `'${name}' is no ${type.kind}`)
  }
  switch (type.kind) {
    case 'string':
    case 'bool':
      must(typeof value === (type.kind === 'bool' ? 'boolean' : 'string'))
      return value
    case 'dictionary':
      return canonical(value, type.items[0], name)
    case 'int16':
    case 'int32':
      must(Number.isInteger(value))
      return value
    case 'int64':
      must(typeof value === 'bigint')
      return value.toString()
    case 'float32':
    case 'float64':
      must(typeof value === 'number')
      return value
    case 'timestamp': // Arrow IPC: a number of milliseconds
      return (typeof value === 'bigint' ? value : BigInt(Math.round(value * 1000))).toString()
    case 'fixed_size_binary':
      must(value instanceof Uint8Array && value.length === 32)
      return Buffer.from(value).toString('hex')
    case 'list':
      return Array.from(value, item => canonical(item, type.items[0], name))
    case 'map': {
      const pairs = Array.isArray(value) ? value : Object.entries(value)
      return Object.fromEntries(pairs.map(([k, v]) => [k, canonical(v, type.items[1], name)]).sort(byKey))
    }
    case 'struct':
      return Object.fromEntries(type.fields.map(([f, kind]) => [f, canonical(value[f], kind, name)]))
  }
  throw new Error(`unknown type ${type.kind}`)
}

const byKey = ([a], [b]) => (a < b ? -1 : a > b ? 1 : 0)

/** A type as schema/trace.json writes it: `list<float32 | null>`, `struct<start: int32, …>`, `timestamp[us, tz=UTC]`. */
function parseType(text) {
  const [, kind, inner] = /^(\w+)(?:<(.*)>|\[.*\])?$/.exec(text.replace(/ \| null$/, ''))
  if (inner === undefined) return { kind }
  const parts = split(inner)
  if (kind !== 'struct') return { kind, items: parts.map(parseType) }
  return { kind, fields: parts.map(part => [part.slice(0, part.indexOf(':')), parseType(part.slice(part.indexOf(':') + 2))]) }
}

function split(text) {
  const parts = ['']
  let depth = 0
  for (const c of text) {
    if (c === '<' || c === '[') depth++
    if (c === '>' || c === ']') depth--
    if (c === ',' && depth === 0) parts.push('')
    else parts[parts.length - 1] += c
  }
  return parts.map(part => part.trim())
}

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [path, ...more] = process.argv.slice(2)
  if (path === undefined || more.length) {
    console.error('usage: node read.mjs TRACE')
    process.exit(2)
  }
  try {
    const { rows, state_digests } = await readTrace(path)
    console.log(JSON.stringify({ rows, state_digests }))
  } catch (error) {
    console.error(`error: ${error instanceof Refusal ? error.message : `${path}: ${oneLine(error)}`}`)
    process.exitCode = 3
  }
}
