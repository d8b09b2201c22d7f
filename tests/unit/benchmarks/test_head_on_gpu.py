"""Training of a head on conversations that the target writes in a batch, here on a CPU."""

import json
import shutil
from functools import partial
from itertools import islice

import pytest
import torch

from benchmarks.train_head import Conversations, Teacher, Writer, main, measure, train
from services.demo_pair import TARGET_DIR
from services.engine.core.model import load_model
from services.engine.loader import load_engine
from services.train.answers.prompts import Job
from services.train.answers.states import StateStore
from services.train.answers.store import Sequence
from services.train.batches import build_batch
from services.train.head import TrainableHead

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ 'def ' + m['role'] + '(x):' + m['content'] + '\nraise\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'def assistant(x):' }}{% endif %}"
)
TAPS = (2, 8, 13, 16)
END, TO_ANSWER, TO_TURN = 7, [7, 8, 9], [10, 11]


@pytest.fixture(scope="module")
def target():
    return load_model(str(TARGET_DIR), device="cpu", dtype="float32").module


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    monkeypatch.setattr("benchmarks.train_head._MAX_TURN", 4)
    monkeypatch.setattr("benchmarks.train_head._MAX_ANSWER", 30)


def written(target, rows=6, length=80, seed=0):
    torch.manual_seed(seed)
    prompts = [torch.randint(300, 2000, (3 + row,)).tolist() for row in range(rows)]
    jobs = [
        Job(row, prompt, TO_ANSWER if row % 2 else None, (0.0, 1.0)[row // 2 % 2])
        for row, prompt in enumerate(prompts)
    ]
    writer = Writer(target, rows, (0,), TO_ANSWER, TO_TURN, length)
    return jobs, writer.write(jobs)


def test_greedy_answers_are_the_targets_likeliest_tokens_and_begin_after_the_turn_of_a_user(target):
    jobs, talks = written(target)
    with torch.no_grad():
        likeliest = target(talks.token_ids).logits.argmax(-1)
    for row, job in enumerate(jobs):
        assert talks.token_ids[row, : len(job.prompt)].tolist() == job.prompt
        places = talks.is_answer[row].nonzero()[:, 0]
        agreement = (likeliest[row, places - 1] == talks.token_ids[row, places]).float().mean()
        assert len(places) > 5
        assert agreement == 1 if job.temperature == 0 else agreement < 1
        first = len(job.prompt)
        if job.turn_end is not None:
            first = talks.token_ids[row].tolist().index(END) + len(TO_ANSWER)
            assert talks.token_ids[row, first - len(TO_ANSWER) : first].tolist() == TO_ANSWER
            assert first <= len(job.prompt) + 4 + len(TO_ANSWER)
        own = talks.is_answer[row].tolist()
        assert own.index(True) == first
        end = own.index(False, first)
        following = talks.token_ids[row, end - 1 : end + 3].tolist()
        if end - first == 29:  # the answer was cut: its end is not the target's
            following = following[1:]
        assert following[0] in (0, END)
        assert following[1:3] == TO_TURN
        assert True in own[end:]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_batches_are_those_of_stored_answers(target, tmp_path, temperature):
    _, talks = written(target, rows=1)
    places = talks.is_answer[0].nonzero()[:, 0].tolist()
    first = places[0]
    last = next((p for p in range(first, 80) if not talks.is_answer[0, p]), 80)
    token_ids = talks.token_ids[:, :last]
    one = Conversations(token_ids, talks.is_answer[:, :last], torch.full((1,), temperature))
    with torch.no_grad():
        logs = (target(token_ids).logits[0, first - 1 : last - 1] / temperature).log_softmax(-1)
    top = logs.topk(32, -1)
    sequence = Sequence(
        token_ids[0].int().numpy(), first, 0.0, top.indices.numpy(), top.values.half().numpy()
    )
    states = StateStore(tmp_path, partial(load_engine, str(TARGET_DIR)), TAPS).of([sequence])
    expected = build_batch([sequence], 3, states)
    found = Teacher(target, TAPS).batch(one, torch.arange(2048), 3, torch.zeros(1, dtype=torch.long))
    for name in ("token_ids", "starts", "place", "labels", "top_ids"):
        assert getattr(found, name).equal(getattr(expected, name)), name
    torch.testing.assert_close(found.top_logs, expected.top_logs, atol=2e-2, rtol=0)
    torch.testing.assert_close(found.states.bfloat16(), expected.states, atol=0.1, rtol=0.02)


def test_a_window_has_the_states_and_labels_of_its_part(target):
    _, talks = written(target, rows=2)
    teacher, ids = Teacher(target, TAPS), torch.arange(2048)
    whole = teacher.batch(talks, ids, 2, torch.zeros(2, dtype=torch.long))
    part = teacher.batch(talks, ids, 2, torch.tensor([0, 30]))
    assert part.states[1, : 80 - 30].equal(whole.states[1, 30:])
    wanted = {tuple(x) for x in whole.place.tolist() if x[0] == 0 or x[1] > 30}
    assert {tuple(x) for x in part.place.tolist()} == wanted
    kept = torch.tensor([tuple(x) in wanted for x in whole.place.tolist()])
    order = sorted(range(int(kept.sum())), key=lambda i: whole.place[kept][i].tolist())
    other = sorted(range(len(part.place)), key=lambda i: part.place[i].tolist())
    assert whole.labels[kept][order].equal(part.labels[other])


@pytest.mark.nightly
def test_training_raises_what_is_measured(target):
    _, talks = written(target)
    teacher = Teacher(target, TAPS)
    torch.manual_seed(0)
    head = TrainableHead(target, TAPS, torch.arange(2048), lambda _: [])
    before = measure(head, teacher, talks)
    steps = train(head, teacher, talks, seconds=600, rows=2, peak=3e-3, kl_until=0.5)
    losses = [loss.item() for _, loss in islice(steps, 30)]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    after = measure(head, teacher, talks)
    assert after["overlap"][0] > before["overlap"][0] + 0.02
    assert after["greedy"][0] > before["greedy"][0]


@pytest.mark.nightly
def test_the_program_writes_a_head_that_it_trains_further(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "target"
    shutil.copytree(TARGET_DIR, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr("benchmarks.train_head.Writer", partial(Writer, length=128))
    given = ["--target", str(folder), "--device", "cpu", "--rows", "2", "--batch", "2", "--outputs", "512"]
    given += ["--write", "0", "--train", "1"]
    for out, init in (("first", []), ("second", ["--init", str(tmp_path / "first")])):
        monkeypatch.setattr("sys.argv", ["train_head", "--out", str(tmp_path / out), *given, *init])
        main()
    card = json.loads((tmp_path / "second" / "gammaray.json").read_text())["measured"]
    assert card["gamma"] == 5
    assert card["answer_tokens"] > 0
    assert "step 1, loss" in capsys.readouterr().out
