"""What does an estimate over the wire cost, beside a bare echo of the same kind of server?

    python bench/rpc.py

One process serves both: `Estimate` and a method that returns its bytes. A client with a few calls
in flight asks each for some seconds, in turns, so that a machine that gets slower hits both.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
from campaigns import machine, verdict
from grpc_health.v1._async import HealthServicer

from advisor.convert import estimate_request_message
from advisor.job_facts import EstimateRequest, JobFacts
from advisor.models.plan import Plan
from advisor.profiler.records import Config
from advisor.service import server as servers
from advisor.service.estimator import Estimator
from advisor.service.jobs import Jobs
from advisor.service.store import Store
from advisor.v1 import advisor_pb2 as pb
from advisor.v1 import advisor_pb2_grpc

LEAST_SHARE, MOST_P99 = 0.4, 3.0
IN_FLIGHT, TURN_S, TURNS = 4, 2.0, 5
ECHO = "/bench.Echo/Echo"


class Echo(grpc.GenericRpcHandler):
    """Returns what it is sent."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> object:
        """Returns the handler of the one method there is."""
        if handler_call_details.method != ECHO:
            return None

        async def echo(request: bytes, context: object) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(echo)


async def serve(address: str, data: Path) -> None:
    """Serves both until it is killed."""
    with Store(data) as store:
        estimator = Estimator(store)
        await estimator.prior()
        server = await servers.make_server(store, Jobs(store, data), estimator, HealthServicer())
        server.add_generic_rpc_handlers((Echo(),))
        with servers.bound(server, address):
            await server.start()
            await server.wait_for_termination()


def requests(count: int) -> list[bytes]:
    """Returns requests that all differ: nothing is answered from a memory of the last ones."""
    chance = random.Random(0)
    made = []
    for _ in range(count):
        facts = JobFacts(
            device=chance.choice(("a100-80gb", "h100", "v100", "rtx-4090")),
            family=chance.choice(("bert", "gpt2", "t5", "resnet")),
            precision=chance.choice(("amp-bf16", "tf32", "amp-fp16")),
            parameters=chance.uniform(1e7, 1e9),
            batch=float(chance.randrange(1, 64)),
            length=float(chance.randrange(32, 1024)),
            eager_step_s=chance.uniform(0.01, 1.0),
        )
        request = EstimateRequest(facts=facts, plan=Plan(steps=20_000), configs=(Config(),))
        made.append(estimate_request_message(request).SerializeToString())
    return made


async def turn(call: Callable[[bytes], Awaitable[object]], given: list[bytes]) -> list[float]:
    """Returns the seconds of each call of one turn."""
    taken: list[float] = []
    until = time.perf_counter() + TURN_S

    async def worker(offset: int) -> None:
        place = offset
        while time.perf_counter() < until:
            begun = time.perf_counter()
            await call(given[place % len(given)])
            taken.append(time.perf_counter() - begun)
            place += IN_FLIGHT

    await asyncio.gather(*(worker(index) for index in range(IN_FLIGHT)))
    return taken


async def ask(address: str) -> tuple[list[float], list[float]]:
    """Returns the seconds of all calls: echoes, estimates."""
    given = requests(4000)
    async with grpc.aio.insecure_channel(address) as channel:
        echo = channel.unary_unary(ECHO)
        estimate = channel.unary_unary(
            "/compile_advisor.v1.Advisor/Estimate",
            response_deserializer=pb.EstimateResponse.FromString,
        )
        await channel.channel_ready()
        stub = advisor_pb2_grpc.AdvisorStub(channel)
        await stub.Estimate(pb.EstimateRequest.FromString(given[0]))
        await turn(echo, given)
        await turn(estimate, given)
        echoes: list[float] = []
        estimates: list[float] = []
        for _ in range(TURNS):
            echoes += await turn(echo, given)
            estimates += await turn(estimate, given)
    return echoes, estimates


def main() -> None:
    """Prints the throughputs and ends with 1 when a claim does not hold."""
    with tempfile.TemporaryDirectory(prefix="adv-") as folder:
        address = f"unix:{folder}/s"
        data = Path(folder, "data")
        data.mkdir()
        server = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(address, data), daemon=True
        )
        server.start()
        try:
            while not Path(folder, "s").exists():
                time.sleep(0.1)
            echoes, estimates = asyncio.run(ask(address))
        finally:
            server.kill()
            server.join()
    rates = [len(each) / (TURN_S * TURNS) for each in (echoes, estimates)]
    tails = [float(np.quantile(each, 0.99)) for each in (echoes, estimates)]
    share, tail = rates[1] / rates[0], tails[1] / tails[0]
    print(f"echo {rates[0]:.0f} calls/s, p99 {tails[0] * 1e3:.2f} ms")
    print(f"estimate {rates[1]:.0f} calls/s, p99 {tails[1] * 1e3:.2f} ms")
    print(f"{share:.0%} of the echo's throughput, p99 {tail:.1f} times the echo's")
    print(machine())
    verdict("estimates over the wire", ok=share >= LEAST_SHARE and tail <= MOST_P99)


def _serve(address: str, data: Path) -> None:
    asyncio.run(serve(address, data))


if __name__ == "__main__":
    main()
