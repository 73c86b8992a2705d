-- Rows of `expected/` as the declared columns, ready for a Parquet file, written from schema/trace.md and files.md.
--
--     .read write.sql
--     COPY (SELECT * FROM trace_rows('expected/valid/everything.json')) TO 'trace.parquet'
--         (FORMAT parquet, COMPRESSION zstd, KV_METADATA {memopd_trace: '{"spec_version": "1.0", …}'});
--
-- DuckDB has no dictionary and no fixed-size binary type: strings and 32-byte blobs read alike.

CREATE OR REPLACE MACRO utc(microseconds) AS make_timestamptz(microseconds);

CREATE OR REPLACE MACRO trace_rows(file) AS TABLE
    SELECT * REPLACE (
        unhex(state_digest) AS state_digest,
        [struct_pack("start" := m."start", stop := m.stop, sha256 := unhex(m.sha256), mime := m.mime, uri := m.uri)
         FOR m IN media] AS media,
        utc(started_at) AS started_at,
        utc(ended_at) AS ended_at
    )
    FROM (
        SELECT unnest("rows", max_depth := 2)
        FROM read_json(file, columns = {"rows": 'STRUCT(
            episode_id VARCHAR, invocation_index INT, model_id VARCHAR, prompt_ids INT[], output_ids INT[],
            parent_index INT, relation VARCHAR, rewrite_kind VARCHAR, rewrite_evidence VARCHAR,
            segments STRUCT("start" INT, stop INT, kind VARCHAR, source_index INT, source_start INT)[],
            group_id VARCHAR, task_id VARCHAR, agent_id VARCHAR, attempt INT, accepted BOOLEAN,
            position_ids INT[], visible_from INT[], visible_until INT[], output_slots INT[],
            media STRUCT("start" INT, stop INT, sha256 VARCHAR, mime VARCHAR, uri VARCHAR)[], state_digest VARCHAR,
            output_logprobs FLOAT[], logprob_kind VARCHAR, output_kept_logmass FLOAT[],
            output_sampled BOOLEAN[], output_loss_mask BOOLEAN[],
            sampling STRUCT(temperature DOUBLE, top_p DOUBLE, top_k INT, min_p DOUBLE, repetition_penalty DOUBLE, seed BIGINT),
            policy_version BIGINT, output_policy_versions BIGINT[], kv_policy_version BIGINT,
            routed_experts SMALLINT[], finish_reason VARCHAR, token_source VARCHAR,
            reward DOUBLE, rewards MAP(VARCHAR, DOUBLE), terminated BOOLEAN, truncated BOOLEAN,
            prompt_text VARCHAR, output_text VARCHAR, messages VARCHAR, started_at BIGINT, ended_at BIGINT,
            extra MAP(VARCHAR, VARCHAR))[]'})
    );
