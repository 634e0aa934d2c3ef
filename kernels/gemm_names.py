"""Names that the templates share with whoever builds variants of them. Imports no tvm."""

# Where a stress build may sleep: before each barrier wait and each hand-over of each role.
DELAY_POINTS = (
    "producer_wait",
    "producer_load",
    "consumer_wait",
    "consumer_release",
    "epilogue_stage",
    "epilogue_store",
    "exchange_send",
    "exchange_sum",
    "exchange_release",
    "scheduler_ask",
)

# Answers of cluster launch control that a CTA holds: one is read by the last role while the first waits for the other.
ANSWER_SLOTS = 2
