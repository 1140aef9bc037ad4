"""What the server is told beside the engine's own options."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``names``: what clients may call the model, the first of them in answers.

    ``api_keys``          any of these opens the server; none leaves it open.
    ``admin_api_keys``    these open it too, see everybody's requests, and may empty the cache.
    ``salt_by_api_key``   holders of different keys share no cached blocks.
    ``host``              the address that it listens on.
    ``allowed_hosts``     names that it may be called by ("*": all of them); none: as ``browsers.Hosts`` says.
    ``allowed_origins``   web pages that may call it from a browser ("*": all of them).
    ``page``              whether there is a live page at /.
    ``max_model_len``     tokens of a prompt and its answer together; None: what model and pools allow.
    ``max_body_bytes``    of a request.
    ``max_buffered_bytes``  of all bodies that are being received.
    ``max_connections``   open at the same time; beyond that those that ask nothing are closed, oldest first.
    ``read_timeout_s``    for a request's head, and for each MiB of its body. Also how long a client may leave a stream
                          unread once its buffers are full.
    ``traces_endpoint``   where spans of requests are sent (OTLP over HTTP); "": nowhere.
    ``exit_on_engine_death``  whether the server ends once its engine has died; else it answers 503 until it is told to.
    ``log_stats``         whether the log has a line of throughput every ten seconds while there is work.
    ``drain_timeout_s``   that running requests have to end after SIGTERM or SIGINT.
    """

    names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    salt_by_api_key: bool = False
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    page: bool = True
    max_model_len: int | None = None
    max_body_bytes: int = 8 * MIB
    max_buffered_bytes: int = 256 * MIB
    max_connections: int = 4096
    read_timeout_s: float = 30.0
    drain_timeout_s: float = 30.0
    traces_endpoint: str = ""
    exit_on_engine_death: bool = True
    log_stats: bool = True
