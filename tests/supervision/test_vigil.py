from supervision.vigil import Vigil


def test_a_child_that_beats_on_time_lives():
    vigil = Vigil(heartbeat=1, watchdog=10, now=0)
    for now in range(1, 100):
        assert vigil.verdict(now) == ""
        vigil.beat(now, progress=0, busy=False)


def test_two_missed_beats_are_the_end():
    vigil = Vigil(heartbeat=2, watchdog=10, now=0)
    vigil.beat(10, 0, busy=False)
    assert vigil.deadline == 15
    assert vigil.verdict(14.9) == ""
    assert vigil.verdict(15) == "no heartbeat for 5.0 s"


def test_work_that_waits_without_progress_is_the_end():
    vigil = Vigil(heartbeat=1, watchdog=3, now=0)
    for now in (1, 2, 3):
        vigil.beat(now, progress=7, busy=True)
        assert vigil.verdict(now) == ""
    vigil.beat(4, progress=7, busy=True)
    assert vigil.verdict(4) == "busy without progress for 3.0 s"


def test_progress_or_rest_starts_the_watchdog_anew():
    vigil = Vigil(heartbeat=1, watchdog=3, now=0)
    for now in range(1, 30):
        vigil.beat(now, progress=now // 2, busy=True)
        assert vigil.verdict(now) == ""
    vigil = Vigil(heartbeat=1, watchdog=3, now=0)
    for now in range(1, 30):
        vigil.beat(now, progress=0, busy=now % 3 != 0)
        assert vigil.verdict(now) == ""


def test_a_watcher_that_was_late_itself_looks_once_more():
    vigil = Vigil(heartbeat=1, watchdog=10, now=0)
    vigil.forgive(60)
    assert vigil.verdict(60) == ""
    assert vigil.deadline == 61
    assert vigil.verdict(61) != ""
