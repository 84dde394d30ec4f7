import gc

import pytest

from rankloom.base.garbage import lasting


def test_nothing_is_collected_inside_and_what_there_is_then_is_never_looked_at():
    with lasting():
        assert not gc.isenabled()
        kept = [object]
    assert gc.isenabled() and gc.get_freeze_count() and not any(kept is found for found in gc.get_objects())


def test_a_collector_that_was_off_stays_off_and_one_that_was_on_is_on_after_an_error():
    gc.disable()
    try:
        with lasting():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ImportError), lasting():
        raise ImportError
    assert gc.isenabled()
