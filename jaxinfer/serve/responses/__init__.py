"""`/v1/responses`: answers that the server keeps for a while, so that later requests go on from them."""
