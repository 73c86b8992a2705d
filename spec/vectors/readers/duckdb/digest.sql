-- The state digest of a trace's rows in DuckDB, written from section 5.1 of trace.md.
--
--     .read digest.sql
--     SELECT * FROM state_digests('trace.parquet');
--
-- The digests come in the order of episode and index; `state_digests` of expected/ stand in the order of the rows.
--
-- The canonical bytes are put together as hex and hashed as a blob. A column that the file does not have reads as null.

CREATE OR REPLACE MACRO int32_hex(v) AS
    printf('%02x%02x%02x%02x', v & 255, (v >> 8) & 255, (v >> 16) & 255, (v >> 24) & 255);

-- lengths: uint64, below 2^31
CREATE OR REPLACE MACRO uint64_hex(v) AS int32_hex(v) || '00000000';

CREATE OR REPLACE MACRO array_hex(a) AS
    uint64_hex(len(a)) || array_to_string([int32_hex(x) for x in a], '');

-- no items where the column is null or holds the default
CREATE OR REPLACE MACRO unless_default(a, written_out) AS if(a IS NULL OR a = written_out, [], a);

CREATE OR REPLACE MACRO media_hex(m) AS
    uint64_hex(len(coalesce(m, [])))
    || array_to_string([int32_hex(x.start) || int32_hex(x.stop) || lower(hex(x.sha256)) for x in coalesce(m, [])], '');

CREATE OR REPLACE MACRO canonical_hex(prompt_ids, output_ids, n, position_ids, visible_from, visible_until, output_slots, media) AS
    lower(hex('memopd-trace/state/1'::BLOB))
    || array_hex(prompt_ids)
    || array_hex(output_ids)
    || array_hex(unless_default(position_ids, range(n)))
    || array_hex(unless_default(visible_from, range(n)))
    || array_hex(unless_default(visible_until, [n for _ in range(n)]))
    || array_hex(coalesce(output_slots, []))
    || media_hex(media);

CREATE OR REPLACE MACRO state_digests(file) AS TABLE
    WITH declared AS (
        SELECT NULL::INT[] AS position_ids, NULL::INT[] AS visible_from, NULL::INT[] AS visible_until,
               NULL::INT[] AS output_slots, NULL::STRUCT(start INT, stop INT, sha256 BLOB)[] AS media
        WHERE false
    ),
    rows AS (
        SELECT * FROM declared UNION ALL BY NAME SELECT * FROM read_parquet(file)
    ),
    sized AS (
        SELECT *, len(prompt_ids) + if(output_slots IS NULL, len(output_ids), 0) AS n FROM rows
    )
    SELECT episode_id, invocation_index,
           sha256(unhex(canonical_hex(prompt_ids, output_ids, n, position_ids, visible_from, visible_until, output_slots,
                                      media))) AS state_digest
    FROM sized
    ORDER BY episode_id, invocation_index;
