"""The board as an actor: the same calls, from any process, and a reader that is gone harms nobody."""

import pytest
import ray

from orchestrator.reporting.board import RemoteBoard, start_remote_board
from tests.ray.machines import own_ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with own_ray(1):
        yield


@ray.remote
def drive(board: RemoteBoard) -> str | None:
    board.post({"ev": "from another process"})
    return board.stop_requested()


def test_events_one_way_and_the_wish_to_stop_the_other_way():
    board = start_remote_board()
    board.post({"ev": "first"})
    assert board.read(0, timeout_s=30) == (1, [{"ev": "first"}])
    assert board.read(1, timeout_s=0.1) == (1, [])
    assert board.stop_requested() is None
    board.request_stop("SIGINT")
    assert ray.get(drive.remote(board)) == "SIGINT"
    assert board.read(1, timeout_s=30) == (2, [{"ev": "from another process"}])


def test_a_board_that_is_gone_harms_nobody():
    board = start_remote_board()
    board.post({"ev": "first"})
    board.read(0, timeout_s=30)
    ray.kill(board._actor)
    board.post({"ev": "into the void"})
    board.request_stop("SIGINT")
    assert board.stop_requested() is None
    assert board.read(1, timeout_s=0.1) == (1, [])
