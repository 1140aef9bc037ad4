"""What a step of the bookkeeping costs as a server grows: running requests, context, pools, groups."""
