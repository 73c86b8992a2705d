"""What a request's headers, key and address tell the proxy, and what of them goes on."""

from __future__ import annotations

import pytest

from memopd_trace.errors import UsageError
from memopd_trace.record.proxy.headers import read_labels, to_client, to_upstream
from memopd_trace.record.proxy.options import listen_address, upstream_url
from memopd_trace.record.proxy.request import inflate


def test_labels_are_read_from_headers_and_the_key() -> None:
    headers = [
        (b"X-Memopd-Group", "gr\u00fc".encode()),
        (b"authorization", b"Bearer k#ep/1"),
        (b"x-memopd-end", b"truncated"),
    ]
    found = read_labels(headers)
    assert (found.episode, found.group, found.end, found.retry) == ("ep/1", "gr\u00fc", "truncated", 0)
    assert read_labels([*headers, (b"x-memopd-episode", b"other")]).episode == "other"
    with pytest.raises(UsageError, match="given twice"):
        read_labels([(b"x-memopd-group", b"a"), (b"X-Memopd-Group", b"a")])


def test_headers_of_one_connection_do_not_go_on() -> None:
    headers = [
        (b"Host", b"a"),
        (b"Connection", b"close, X-Hop"),
        (b"x-hop", b"1"),
        (b"TE", b"x"),
        (b"Accept-Encoding", b"br"),
    ]
    assert to_upstream(headers, identity=False) == [(b"accept-encoding", b"br")]
    assert to_upstream(headers, identity=True) == [(b"accept-encoding", b"identity")]
    answer = [
        (b"Content-Length", b"3"),
        (b"X-Memopd-End", b"1"),
        (b"ETag", b"x"),
        (b"X-A", b"1"),
        (b"Keep-Alive", b"5"),
    ]
    assert to_client(answer, changed=True) == [(b"X-A", b"1")]
    assert to_client(answer, changed=False) == [(b"Content-Length", b"3"), (b"ETag", b"x"), (b"X-A", b"1")]


def test_addresses() -> None:
    assert upstream_url("http://h:1/v1/") == "http://h:1"
    assert upstream_url("https://h/api/openai/v1") == "https://h/api/openai"
    for wrong in ("h:1", "ftp://h", "http://", "http://u:secret@h", "http://h?x=1", "http://h:99999"):
        with pytest.raises(UsageError) as error:
            upstream_url(wrong)
        assert "secret" not in str(error.value)
    assert listen_address("127.0.0.1:80") == ("127.0.0.1", 80) and listen_address("[::1]:0") == ("::1", 0)
    assert listen_address(":81") == ("127.0.0.1", 81)
    for wrong in ("x", "h:", "h:x", "h:70000"):
        with pytest.raises(UsageError):
            listen_address(wrong)


def test_an_encoding_that_is_not_known_or_not_whole_is_refused() -> None:
    for encoding, data in (("br", b"x"), ("gzip", b"x"), ("gzip", b""), ("deflate", b"")):
        with pytest.raises(ValueError):
            inflate(data, encoding, 10)
    assert inflate(b"abc", "", 2) == b"abc", "a plain body's length is bounded where it is read"
