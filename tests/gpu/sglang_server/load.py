"""Load for a prefill/decode pair: each request goes to both servers with one room. Prints one JSON object.

python load.py --prefill 30001 --decode 30002 --bootstrap 8998 --requests 200 --at-once 60 --low 200 --high 12000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from typing import Any

import aiohttp


def prompt(number: int, low: int, high: int, groups: int) -> list[int]:
    """Token ids of one prompt; its length is spread evenly over the logarithm of low .. high.

    With ``groups``, prompts of a group share four fifths of their ids.
    """
    lengths = random.Random(7000 + (number % groups if groups else number))
    length = round(math.exp(lengths.uniform(math.log(low), math.log(high))))
    own = random.Random(number)
    ids = [own.randrange(2, 8192) for _ in range(length)]
    if groups:
        common = random.Random(900_000 + number % groups)
        shared = length * 4 // 5
        ids[:shared] = [common.randrange(2, 8192) for _ in range(shared)]
    return ids


async def post(session: aiohttp.ClientSession, port: int, body: dict[str, Any]) -> tuple[int, str]:
    limit = aiohttp.ClientTimeout(total=120)
    async with session.post(f"http://127.0.0.1:{port}/generate", json=body, timeout=limit) as reply:
        return reply.status, (await reply.text())[:300]


async def one(session: aiohttp.ClientSession, options: argparse.Namespace, number: int) -> tuple[str, float]:
    room = options.first_room + number * options.stride
    body = {
        "input_ids": prompt(options.seed * 100_000 + number, options.low, options.high, options.groups),
        "sampling_params": {"temperature": 0, "max_new_tokens": options.out, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": options.bootstrap,
        "bootstrap_room": room,
        "rid": f"request-{room}",
    }
    began = time.monotonic()
    try:
        replies = await asyncio.gather(
            post(session, options.prefill, body), post(session, options.decode, body)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200], time.monotonic() - began
    bad = [f"{status} {text}" for status, text in replies if status != 200]
    return (bad[0] if bad else "", time.monotonic() - began)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    gate = asyncio.Semaphore(options.at_once)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def guarded(number: int) -> tuple[str, float]:
            async with gate:
                return await one(session, options, number)

        began = time.monotonic()
        replies = await asyncio.gather(*(guarded(number) for number in range(options.requests)))
        seconds = time.monotonic() - began
    bad = [why for why, _ in replies if why]
    times = sorted(t for why, t in replies if not why) or [0.0]
    return {
        "requests": options.requests,
        "failed": len(bad),
        "first_failures": bad[:3],
        "seconds": round(seconds, 2),
        "requests_per_second": round((options.requests - len(bad)) / seconds, 3),
        "median_seconds": round(times[len(times) // 2], 3),
        "longest_seconds": round(times[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (
        ("prefill", 30001), ("decode", 30002), ("bootstrap", 8998), ("requests", 200), ("at-once", 60), ("low", 200),
        ("high", 12000), ("out", 32), ("first-room", 1000), ("stride", 1), ("seed", 1), ("groups", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    print(json.dumps(asyncio.run(run(parser.parse_args()))), flush=True)


if __name__ == "__main__":
    main()
