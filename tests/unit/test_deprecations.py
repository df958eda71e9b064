"""Deprecated functions work, and warn where they are called."""

import inspect
import warnings

import pytest

from fastness import FastnessDeprecationWarning, deprecated


class Shop:
    @deprecated("use Shop.sell", since="0.3", removed_in="0.5")
    def trade(self, item: str, *, amount: int = 1) -> str:
        """Sell an item."""
        return f"{amount} {item}"

    @deprecated("use Shop.sell", since="0.9", removed_in="1.0")
    async def trade_async(self, item: str) -> str:
        return item


def test_a_deprecated_function_warns_with_its_replacement_once_for_each_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        answers = [Shop().trade("apples", amount=number) for number in range(3)]
        Shop().trade("pears")
    assert answers == ["0 apples", "1 apples", "2 apples"]
    assert [str(each.message) for each in caught] == [
        "Shop.trade is deprecated since 0.3 and will be removed in 0.5; use Shop.sell"
    ] * 2
    assert {(each.category, each.filename) for each in caught} == {(FastnessDeprecationWarning, __file__)}
    assert caught[0].lineno + 1 == caught[1].lineno
    assert (Shop.trade.__name__, Shop.trade.__doc__) == ("trade", "Sell an item.")
    assert "amount" in inspect.signature(Shop.trade).parameters


async def test_a_deprecated_coroutine_function_stays_one() -> None:
    assert inspect.iscoroutinefunction(Shop.trade_async)
    with pytest.warns(FastnessDeprecationWarning, match="use Shop.sell") as caught:
        assert await Shop().trade_async("apples") == "apples"
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("since", "removed_in"), [("0.3", "0.4"), ("1.2", "1.2"), ("1.2", "0.9")])
def test_what_is_deprecated_works_for_two_minor_versions(since: str, removed_in: str) -> None:
    with pytest.raises(ValueError, match="two minor versions"):
        deprecated("use another", since=since, removed_in=removed_in)
