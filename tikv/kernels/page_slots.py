"""The slot of each new token, from its request, its position and the pages of all requests, one after the other."""

from typing import NamedTuple

from tikv.kernels.address import index_array
from tikv.kernels.lanes import make_loop
from tikv.runtime import ti


class PageSlotsParams(NamedTuple):
    """Numbers of a launch; first entries and strides of the index arrays."""

    tokens: int = 0
    page: int = 1  # slots of a page
    pages: int = 0  # of all requests
    requests: int = 0
    request_first: int = 0
    request_step: int = 1
    position_first: int = 0
    position_step: int = 1
    page_first: int = 0
    page_step: int = 1
    start_first: int = 0
    start_step: int = 1
    slot_first: int = 0


MOST_SLOTS = 0x7FFFFFFF
P = PageSlotsParams(*range(len(PageSlotsParams._fields)))
PARAMS = ti.types.vector(len(P), ti.i32)


def make_page_slots(style, bits):
    """page_slots(requests, positions, pages, starts, slots, params); `bits` of each index array, slots are 32.

    A token without a request, a position or a page gets -1, which a write skips.
    """
    REQUESTS, POSITIONS, PAGES, STARTS = (index_array(b) for b in bits)
    SLOTS = index_array(32)

    @ti.func
    def slot_of_token(i, arrays: ti.template(), params):
        requests, positions, pages, starts, slots = ti.static(arrays)
        # All comparisons are without signs: Vulkan takes a negative number, widened to 64 bits, for one above 0.
        slot = -1
        b = ti.cast(requests[params[P.request_first] + i * params[P.request_step]], ti.u64)
        position = ti.cast(positions[params[P.position_first] + i * params[P.position_step]], ti.u64)
        ahead = position // ti.cast(params[P.page], ti.u64)
        if b < ti.cast(params[P.requests], ti.u64) and ahead < ti.cast(params[P.pages], ti.u64):
            at = params[P.start_first] + ti.cast(b, ti.i32) * params[P.start_step]
            page = ti.cast(starts[at], ti.i32) + ti.cast(ahead, ti.i32)
            end = ti.min(ti.cast(starts[at + params[P.start_step]], ti.i32), params[P.pages])
            if page >= 0 and page < end:
                block = ti.cast(pages[params[P.page_first] + page * params[P.page_step]], ti.u64)
                if block < ti.cast(MOST_SLOTS // params[P.page], ti.u64):
                    slot = ti.cast(block, ti.i32) * params[P.page] + ti.cast(position, ti.i32) % params[P.page]
        slots[params[P.slot_first] + i] = slot

    loop = make_loop(style, True, slot_of_token, P.tokens)

    @ti.kernel
    def page_slots(
        requests: REQUESTS, positions: POSITIONS, pages: PAGES, starts: STARTS, slots: SLOTS, params: PARAMS
    ):
        # The extent is the number of items, whatever array it is said of: here the first.
        loop(requests, params, ((requests, positions, pages, starts, slots), params))

    return page_slots
