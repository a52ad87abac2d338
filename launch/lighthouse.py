"""``paceline lighthouse``: where islands that average their parameters find each other. One for each job."""

from __future__ import annotations

import argparse
import signal
import socket
from typing import Any

MOST_PORTS = 65535
MOST_ISLANDS = 2**16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("--port", type=int, default=29510, metavar="N", help="0: any that is free (default 29510)")
    parser.add_argument("--host", metavar="ADDRESS", help="to listen at (default: all addresses of this machine)")
    parser.add_argument(
        "--min-islands", type=int, default=1, metavar="N", help="islands that a round has at least (default 1)"
    )
    parser.add_argument(
        "--join-timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="how long a round waits for islands that are alive and do not come, if more than half do (default 600)",
    )
    parser.add_argument(
        "--heartbeat-timeout-s",
        type=float,
        default=5.0,
        metavar="S",
        help="after how long without a sign of life an island counts as dead (default 5)",
    )


def run(args: argparse.Namespace) -> int:
    """The command; it prints the address on a line and returns 0 on SIGINT or SIGTERM.

    Raises:
        ValueError: values out of range, or an address that it cannot listen at.
    """
    from paceline.config.averaging_keys import MOST_WAIT_S

    if not 0 <= args.port <= MOST_PORTS:
        raise ValueError(f"--port is {args.port}: give one from 1 to {MOST_PORTS}, or 0.")
    if not 1 <= args.min_islands <= MOST_ISLANDS:
        raise ValueError(f"--min-islands is {args.min_islands}: give a whole number from 1 to {MOST_ISLANDS}.")
    for flag, value in (("--join-timeout-s", args.join_timeout_s), ("--heartbeat-timeout-s", args.heartbeat_timeout_s)):
        if not 0 < value <= MOST_WAIT_S:
            raise ValueError(f"{flag} is {value:g}: give a number of seconds above 0 and up to {MOST_WAIT_S:g}.")
    stops = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # before the server has threads, which would take them from us
    try:
        server = _serve(args)
        port = server.address().rpartition(":")[2]
        host = args.host or socket.gethostname()
        print(f"lighthouse: {f'[{host}]' if ':' in host else host}:{port}", flush=True)
        signal.sigwait(stops)
        server.shutdown()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
    return 0


def _serve(args: argparse.Namespace) -> Any:
    from paceline.averaging.presence import coordination

    failed = ""
    for host in [args.host] if args.host else ["::", "0.0.0.0"]:  # the first is both, where there is IPv6
        bind = f"[{host}]:{args.port}" if ":" in host else f"{host}:{args.port}"
        try:
            return coordination().LighthouseServer(
                bind=bind,
                min_replicas=args.min_islands,
                join_timeout_ms=round(args.join_timeout_s * 1000),
                heartbeat_timeout_ms=round(args.heartbeat_timeout_s * 1000),
            )
        except RuntimeError as error:
            failed = failed or f"cannot listen at {bind} ({error})"
    raise ValueError(f"{failed}; give another --port or --host, or end what listens there.")
