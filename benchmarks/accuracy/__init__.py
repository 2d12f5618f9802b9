"""How often the judge names the right fault: a simulated pair with a fault in it, judged, compared with the truth."""
