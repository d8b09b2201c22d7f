"""Completions that resume after a failed call: the client's requests, and when it gives up."""

import asyncio

import grpc
import pytest

from gammaray import AsyncClient, GenerationRequest, RetryPolicy, errors
from gammaray.client.transport import Transport
from tests.support.sdk_helpers import (
    FAST_RETRY,
    NO_RETRY,
    ScriptedService,
    answer,
    last,
    piece,
    refuse,
    serve,
)

WORDS = ["one ", "two ", "three ", "four ", "five"]
GONE, BUG = errors.UnavailableError("gone"), errors.InternalError("bug")
FULL, LATE = errors.ResourceExhaustedError("full", 0.01), errors.DeadlineExceededError("late")
PASSING = [GONE, errors.CancelledError("replica died"), BUG]


def breaking(*breaks):
    """Answer with `WORDS` from where the client is; attempt i fails with breaks[i] = (after, error)."""

    async def behaviour(request, attempt):
        for number, word in list(enumerate(WORDS))[request.resume_from :]:
            if attempt < len(breaks) and breaks[attempt][0] == number:
                raise breaks[attempt][1]
            yield last(word) if number == len(WORDS) - 1 else piece(word)

    return behaviour


def pieces_of(chunks):
    return [chunk.text for chunk in chunks]


async def complete(service, retry=FAST_RETRY, **options):
    async with serve(service) as address, AsyncClient(address, retry=retry) as client:
        return (await client.complete("Hi", **options)).text


@pytest.mark.parametrize("error", [*PASSING, FULL, LATE], ids=lambda error: type(error).__name__)
async def test_resume_continues_after_the_last_token(error):
    service = ScriptedService(breaking((2, error), (2, error), (4, error)))
    async with serve(service) as address, AsyncClient(address, retry=FAST_RETRY) as client:
        chunks = [chunk async for chunk in client.generate("Hi", seed=3)]
    assert pieces_of(chunks) == WORDS
    assert [chunk.offset for chunk in chunks] == [0, 1, 2, 3, 4]
    assert [request.resume_from for request in service.requests] == [0, 2, 2, 4]
    assert [request.HasField("resume_from") for request in service.requests] == [False, True, True, True]
    assert len({request.session_id for request in service.requests}) == 1
    assert {request.text for request in service.requests} == {"Hi"}


async def test_completion_that_is_not_stored_is_repeated_until_its_first_token_and_never_resumed():
    service = ScriptedService(breaking((0, GONE), (2, GONE)))
    with pytest.raises(errors.UnavailableError, match="broke after 2 tokens; it is not stored"):
        await complete(service, store=False)
    assert len(service.requests) == 2
    for request in service.requests:
        assert (request.store, request.session_id, request.HasField("resume_from")) == (False, "", False)


class Cut(ScriptedService):
    """Ends its first stream after some tokens as a proxy does: as if all were well, or without a status."""

    def __init__(self, after, status=None):
        super().__init__(breaking())
        self._after, self._proxy_status = after, status

    async def Generate(self, request, context):
        async for message in super().Generate(request, context):
            if len(self.requests) == 1 and message.offset == self._after:
                if self._proxy_status is not None:
                    await context.abort(self._proxy_status, "Stream removed")
                return
            yield message


@pytest.mark.parametrize(("after", "status"), [(0, None), (2, None), (2, grpc.StatusCode.UNKNOWN)])
async def test_resume_retries_a_stream_without_a_final_status(after, status):
    service = Cut(after, status)
    assert await complete(service) == "".join(WORDS)
    assert [request.resume_from for request in service.requests] == [0, after]


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("error", [BUG, FULL, LATE], ids=str)
async def test_new_process_that_resumes_waits_as_the_first_one_would(error, start):
    service = ScriptedService(breaking((start, error)))
    request = GenerationRequest("Hi", session_id="s", resume_from=start)
    async with serve(service) as address, AsyncClient(address, retry=FAST_RETRY) as client:
        assert pieces_of([chunk async for chunk in client.generate(request)]) == WORDS[start:]


FINAL = [
    errors.InvalidArgumentError("prompt", "x", "y"),
    errors.NotFoundError("expired"),
    errors.UnauthenticatedError("no key"),
    errors.FailedPreconditionError("another owner"),
    errors.ModelChangedError("s", "a", ["b"]),
]
MOST = FAST_RETRY.max_attempts
ENDS = {
    **{f"{type(error).__name__} at once": (refuse(error), error, 1) for error in (*FINAL, BUG, FULL, LATE)},
    **{f"{type(error).__name__} later": (breaking((2, GONE), (2, error)), error, 2) for error in FINAL},
    "gone from the start": (refuse(GONE), GONE, MOST),
    "no final status": (answer(), errors.InternalError("finish reason"), MOST),
    "internal later": (breaking(*[(2, BUG)] * 1000), BUG, MOST),
    "later, not stored": (breaking((2, FINAL[0])), FINAL[0], 1, {"store": False}),
    "later, without retries": (breaking((2, GONE)), GONE, 1, {"retry": NO_RETRY}),
}


@pytest.mark.parametrize("case", ENDS.values(), ids=ENDS)
async def test_retries_end_with_the_error(case):
    behaviour, error, num_requests, *options = case
    service = ScriptedService(behaviour)
    with pytest.raises(type(error), match=str(error)):
        await complete(service, **(options[0] if options else {}))
    assert len(service.requests) == num_requests


async def test_resume_gives_up_without_progress():
    hasty = RetryPolicy(max_attempts=4, initial_delay_s=0.01, max_delay_s=0.02, resume_s=0.3)
    service = ScriptedService(breaking(*[(2, GONE)] * 1000))
    with pytest.raises(errors.UnavailableError, match="gone"):
        await complete(service, hasty)
    assert 4 < len(service.requests) < 100


async def test_resume_client_of_a_known_cluster_waits_for_it():
    """A new completion, of a client that knows its cluster, rides out more than `max_attempts` refusals."""
    policy = RetryPolicy(max_attempts=2, initial_delay_s=0.01, max_delay_s=0.01, resume_s=5)
    down = [(5, GONE), *[(0, GONE)] * 6]  # the first completion passes
    async with serve(ScriptedService(breaking(*down))) as address:
        async with AsyncClient(address, retry=policy) as client:
            for _ in range(2):
                assert (await client.complete("Hi")).text == "".join(WORDS)


@pytest.mark.parametrize("shift", [-1, 1])
async def test_resume_server_at_another_place_is_refused(shift):
    class Shifted(ScriptedService):
        async def Generate(self, request, context):
            async for message in super().Generate(request, context):
                message.offset = message.offset + shift if request.resume_from else message.offset
                yield message

    with pytest.raises(errors.InternalError, match="continued at token"):
        await complete(Shifted(breaking((2, GONE))))


async def test_resume_retries_a_broken_stream_immediately():
    """The policy's delays are for a cluster that cannot be reached; here another replica is there."""
    slow = RetryPolicy(initial_delay_s=600.0, max_delay_s=600.0, resume_s=3600.0)
    text = await asyncio.wait_for(complete(ScriptedService(breaking((2, GONE))), slow), 60)
    assert text == "".join(WORDS)


async def test_resume_by_hand_names_session_turn_and_offset():
    service = ScriptedService(breaking())
    async with serve(service) as address, AsyncClient(address, retry=FAST_RETRY) as client:
        chunks = [chunk async for chunk in client.resume("mine", turn=2, offset=3)]
        with pytest.raises(errors.InvalidArgumentError, match="session_id"):
            client.resume("")
        with pytest.raises(errors.InvalidArgumentError, match="resume_from"):
            client.resume("mine", offset=-1)
    assert pieces_of(chunks) == WORDS[3:]
    (request,) = service.requests
    assert (request.session_id, request.turn, request.resume_from) == ("mine", 2, 3)
    assert request.WhichOneof("prompt") != "token_ids"
    assert request.text == ""


async def test_resume_retries_not_found_from_a_proxy():
    class Restarting(ScriptedService):
        num_refused = 0

        async def Generate(self, request, context):
            if request.resume_from and self.num_refused < 3:
                self.num_refused += 1
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such application")
            async for message in super().Generate(request, context):
                yield message

    service = Restarting(breaking((2, GONE)))
    assert await complete(service) == "".join(WORDS)
    assert service.num_refused == 3


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["generate", "status"])
async def test_cancellation_reported_as_a_failure_by_grpc_ends_the_call(monkeypatch, method, error):
    """This happens if it arrives together with a message: retrying would never end."""
    attempts, begun = [], asyncio.Event()

    async def attempt(self, *_):
        attempts.append(self)
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise error from None
        yield

    monkeypatch.setattr(Transport, "attempt", attempt)
    async with AsyncClient("127.0.0.1:1", retry=FAST_RETRY) as client:
        call = client.complete("Hi") if method == "generate" else client.status()
        task = asyncio.create_task(call)
        await begun.wait()
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=10)
        assert done
        if method == "status" and isinstance(error, errors.InternalError):  # never tried again in any case
            assert isinstance(task.exception(), errors.InternalError)
        else:
            assert task.cancelled()
    assert len(attempts) == 1
