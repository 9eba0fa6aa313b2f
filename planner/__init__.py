"""Decisions only, pure: what lives where, which lane does what, and when to change it.

catalog    what there is to place          profile, cost   what it takes, measured or assumed
placement  a plan as data                  search          finding one (spread, context: its parts)
program    what each lane does in a step   validate        the proof that programs fit and run
simulate   the predicted timeline          bounds          what no plan can beat
events     what goes in and comes out      shadow          the state beside a running engine, with
                                           lifecycle, replan, trial, measured: its parts
routing    what routers chose, recorded     routing_files   files of it
experts    which experts stay in RAM        heat, chooser   what is hot; which policy, on line
expert_sim a routing trace replayed and priced
explain    a plan in rows                  synthetic       catalogs for planning without files

With cards, at the grain of groups, from hardware files:
hardware   cards, links, processor, disk   hybrid          loads, sites, plans as data
hybrid_play     a plan played through      hybrid_layouts  what people tune by hand
hybrid_search   finding a better one       hybrid_bounds   what no plan can beat
card_placement  a plan in whole blocks (draft, sections: its parts)
plan_of         a placement as a plan      hand_placement  layouts by hand as placements
hybrid_shadow   a plan watched, and changed     scenarios  what changing could win
"""
