"""What the routes call: plain functions on a session. None of them commits; the route's transaction does."""
